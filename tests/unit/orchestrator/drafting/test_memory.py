"""The memory of earlier responses: bounded, first in first out, apart by salt, safe among threads."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from native.response_memory import NativeMemory
from orchestrator.core.context import Context
from orchestrator.core.proposal import Budget, Proposer
from orchestrator.core.sampling_params import Sampling
from orchestrator.drafting.lookup import Suffix, SuffixConfig
from tests.support.decode import dependencies


def naive_followers(responses: list[list[int]], context: list[int]) -> Counter[int]:
    """What followed a context, by a search of each response."""
    size = len(context)
    return Counter(ids[end] for ids in responses for end in range(size, len(ids)) if ids[end - size : end] == context)


def test_memory_finds_what_followed_in_one_response_at_a_time() -> None:
    rng, memory, responses = random.Random(5), NativeMemory(100_000), list[list[int]]()
    for _ in range(100):
        responses.append([rng.randrange(6) for _ in range(rng.choice([0, 5, 40]))])
        memory.learn("", responses[-1])
        context = [rng.randrange(6) for _ in range(rng.randint(1, 4))]
        assert memory.of("").followers(context) == naive_followers(responses, context)


@pytest.mark.parametrize("salt", ["", "b", "A", "a ", "a\x00", "\ud800"])
def test_memory_another_salt_sees_nothing(salt: str) -> None:
    memory = NativeMemory(10_000)
    memory.learn("a", list(range(100)))
    assert not memory.of(salt).followers([7]) and memory.of("a").followers([7])
    proposer = Suffix(SuffixConfig(), dependencies(memory=memory.of(salt)))
    assert proposer.propose(Context(list(range(50))), Sampling(), Budget(99, 99)).tree.num_nodes == 0


def test_memory_never_holds_more_than_its_bound_and_forgets_the_oldest_first() -> None:
    memory, rng, learnt = NativeMemory(400), random.Random(1), []
    for number in range(300):
        response = [number * 1000 + i for i in range(rng.randint(2, 60))]
        memory.learn("", response)
        learnt.append(response)
        held = [bool(memory.of("").followers(each[:1])) for each in learnt]
        assert held[-1] and held == sorted(held)
    assert 400 // 2 <= sum(len(each) for each, is_held in zip(learnt, held, strict=True) if is_held) <= 400


@pytest.mark.parametrize("length", [399, 400, 401, 5000])
def test_memory_of_a_response_beyond_the_bound_keeps_the_end(length: int) -> None:
    memory = NativeMemory(400)
    memory.learn("", list(range(length)))
    assert memory.of("").followers(list(range(length - 30, length - 1))) == {length - 1: 1}
    assert bool(memory.of("").followers([0])) == (length <= 400)


def test_memory_is_learnt_to_and_drafted_from_by_many_threads() -> None:
    memory, errors, ends = NativeMemory(2000), list[BaseException](), threading.Event()
    proposers = [Suffix(SuffixConfig(), dependencies(memory=memory.of(salt))) for salt in "aabb"]

    def repeat(action: Callable[[int], object]) -> None:
        number = 0
        try:
            while not ends.is_set():
                action(number := number + 1)
        except BaseException as error:
            errors.append(error)

    def learn(number: int) -> None:
        memory.learn("ab"[number % 2], [number % 7, *range(number % 50)])

    def draft(proposer: Proposer, number: int) -> None:
        proposer.propose(Context([*range(number % 40 + 1)]), Sampling(), Budget(20, 20))

    actions = [learn, learn, *(partial(draft, proposer) for proposer in proposers)]
    threads = [threading.Thread(target=repeat, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    ends.set()
    for thread in threads:
        thread.join(10)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)
