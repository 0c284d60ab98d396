"""The memory of earlier responses: bounded, first in first out, apart by salt, safe among threads."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from native.response_memory import NativeMemory
from orchestrator.core.context import Context
from orchestrator.core.proposal import Budget, Proposer
from orchestrator.core.sampling_params import Sampling
from orchestrator.drafting import memory as memory_module
from orchestrator.drafting.automaton import Automaton, Match
from orchestrator.drafting.memory import MAX_DEPTH, NUM_SEGMENTS, PIECE_TOKENS, Memory, new_memory
from orchestrator.drafting.native_methods import suffix
from orchestrator.drafting.suffix import Suffix, SuffixConfig
from tests.support.decode import dependencies


def found(memory: Memory, salt: str, tokens: list[int]) -> int:
    """Length of the longest suffix of `tokens` that the memory knows for a salt."""
    return memory.of(salt).longest(tokens, lambda text, match: match.length) or 0


def test_memory_finds_what_it_has_learnt_and_what_followed() -> None:
    memory = Memory(1000)
    assert found(memory, "", [1, 2]) == 0 and not memory.of("").followers([1])
    memory.learn("", [1, 2, 3, 1, 2, 4])
    memory.learn("", [5, 1, 2, 4])
    assert found(memory, "", [9, 1, 2]) == 2
    assert memory.of("").followers([1, 2]) == {3: 1, 4: 2}
    assert memory.of("").followers([9, 1, 2]) == {}
    assert memory.num_tokens == 10


def test_memory_no_match_runs_across_two_responses() -> None:
    memory = Memory(1000)
    memory.learn("", [1, 2])
    memory.learn("", [3, 4])
    assert not memory.of("").followers([2]) and memory.of("").followers([3]) == {4: 1}
    assert found(memory, "", [1, 2, 3]) == 1  # only 3, and only because 4 followed it


def test_memory_another_salt_sees_nothing() -> None:
    memory = Memory(10_000)
    memory.learn("a", list(range(100)))
    for salt in ("", "b", "A", "a ", "a\x00"):
        assert found(memory, salt, list(range(50))) == 0
        assert not memory.of(salt).followers([7])
        proposer = Suffix(SuffixConfig(), dependencies(memory=memory.of(salt)))
        assert proposer.propose(Context(list(range(50))), Sampling(), Budget(99, 99)).tree.num_nodes == 0
    assert found(memory, "a", list(range(50))) == 50


def test_memory_never_holds_more_than_its_bound_and_forgets_the_oldest_first() -> None:
    memory, rng, learnt = Memory(400), random.Random(1), []
    for number in range(300):
        response = [number * 1000 + i for i in range(rng.randint(1, 60))]
        salt = rng.choice("ab")
        memory.learn(salt, response)
        learnt.append((salt, response))
        held = [bool(memory.of(s).followers(r[:1])) for s, r in learnt if len(r) > 1]
        assert held[-1] or len(response) == 1
        assert memory.num_tokens <= 400
        assert memory.num_tokens == sum(text.num_tokens for _, text in memory._oldest_first)
    held_tokens = [len(r) for s, r in learnt if len(r) > 1 and memory.of(s).followers(r[:1])]
    assert 400 // 2 <= sum(held_tokens) <= 400


def test_memory_of_one_salt_is_first_in_first_out() -> None:
    memory = Memory(400)
    for number in range(100):
        memory.learn("", [number * 100 + i for i in range(10)])
        known = [bool(memory.of("").followers([n * 100])) for n in range(number + 1)]
        assert known == sorted(known)  # forgotten ones first
        assert sum(known) >= min(number + 1, 30)


def test_memory_segments_of_a_salt_are_few_whatever_the_lengths() -> None:
    memory, rng = Memory(1000), random.Random(2)
    for _ in range(500):
        memory.learn("", [rng.randrange(9) for _ in range(rng.choice([1, 5, 130, 249, 260, 999]))])
        with memory.texts("") as texts:
            assert len(texts) <= 2 * NUM_SEGMENTS + 1


@pytest.mark.parametrize("length", [399, 400, 401, 5000])
def test_memory_of_a_response_beyond_the_bound_keeps_the_end(length: int) -> None:
    memory = Memory(400)
    memory.learn("", [7, 8, 9])
    memory.learn("", list(range(length)))
    assert memory.num_tokens <= 400
    assert found(memory, "", list(range(length - 30, length - 1))) == 29
    assert bool(memory.of("").followers([0])) == (length <= 400)


def test_memory_empty_response_leaves_no_trace() -> None:
    memory = Memory(400)
    memory.learn("a", [])
    assert memory.num_tokens == 0 and not memory._by_salt


def test_memory_number_of_segments_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "MAX_SEGMENTS", 50)
    memory = Memory(10_000)
    for number in range(300):
        memory.learn(f"salt {number}", [1, 2])
    assert len(memory._oldest_first) == len(memory._by_salt) == 50
    assert memory.num_tokens == 100
    assert not found(memory, "salt 249", [1]) and found(memory, "salt 250", [1])


def test_memory_match_is_as_deep_as_any_request_may_ask() -> None:
    memory = Memory(1000)
    memory.learn("", list(range(200)))
    assert found(memory, "", list(range(150))) == MAX_DEPTH == 64


def test_memory_longest_match_comes_from_the_newest_generation_of_equals() -> None:
    memory = Memory(40)
    memory.learn("", [1, 2, 3, *range(10, 16)])
    memory.learn("", [1, 2, 4, *range(20, 26)])
    with memory.texts("") as texts:
        assert len(texts) == 2
    assert memory.of("").longest([1, 2], lambda text, match: text.followers(match)[0].token) == 4
    assert memory.of("").followers([1, 2]) == {3: 1, 4: 1}


def test_memory_learning_lets_proposals_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long response is learnt in pieces; the lock is free between two of them."""
    memory, entered, num_free = Memory(1_000_000), list[int](), 0
    num_pieces = 40

    def rest(seconds: float) -> None:
        nonlocal num_free
        num_free += not memory._lock.locked()

    monkeypatch.setattr("orchestrator.drafting.memory.time.sleep", rest)

    class Spy(Automaton):
        def extend(self, tokens: list[int]) -> None:  # type: ignore[override]
            assert memory._lock.locked() and len(tokens) <= PIECE_TOKENS
            entered.append(len(tokens))
            super().extend(tokens)

    memory._by_salt[""] = [Spy(MAX_DEPTH)]
    memory.learn("", list(range(num_pieces * PIECE_TOKENS)))
    assert len(entered) == num_free == num_pieces and not memory._lock.locked()


def test_memory_learn_and_propose_from_many_threads() -> None:
    memory, errors, stop = Memory(3000), list[BaseException](), threading.Event()

    def check(text: Automaton, match: Match) -> int:
        assert match.length and text.followers(match)
        return match.length

    def learn(salt: str, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            base = 100 * (ord(salt) - ord("a"))
            memory.learn(salt, [base + rng.randrange(5) for _ in range(rng.randint(1, 300))])

    def propose(salt: str, seed: int) -> None:
        rng, base = random.Random(seed), 100 * (ord(salt) - ord("a"))
        while not stop.is_set():
            context = Context([base + rng.randrange(5) for _ in range(40)])
            tree = (
                Suffix(SuffixConfig(), dependencies(memory=memory.of(salt)))
                .propose(context, Sampling(), Budget(64, 64))
                .tree
            )
            assert all(base <= token < base + 5 for token in tree.tokens.tolist())
            memory.of(salt).longest(context.ids, check)
            assert all(base <= token < base + 5 for token in memory.of(salt).followers(context.ids[-2:]))

    def guarded(work: object, salt: str, seed: int) -> None:
        try:
            work(salt, seed)  # type: ignore[operator]
        except BaseException as error:
            errors.append(error)

    learners = [threading.Thread(target=guarded, args=(learn, salt, i)) for i, salt in enumerate("aabbc")]
    readers = [threading.Thread(target=guarded, args=(propose, salt, i)) for i, salt in enumerate("abc")]
    for thread in readers + learners:
        thread.start()
    for thread in learners:
        thread.join()
    stop.set()
    for thread in readers:
        thread.join()
    assert not errors
    assert memory.num_tokens == sum(text.num_tokens for _, text in memory._oldest_first) <= 3000


def test_the_native_memory_holds_what_the_reference_holds() -> None:
    rng, native, reference, num_followers = random.Random(5), new_memory(300), Memory(300), 0
    assert isinstance(native, NativeMemory)
    for _ in range(400):
        salt, response = (
            rng.choice(["", "a", "a\x00", "\ud800"]),
            [rng.randrange(6) for _ in range(rng.choice([0, 5, 40, 310]))],
        )
        for memory in (native, reference):
            memory.learn(salt, response)
        context = [rng.randrange(6) for _ in range(rng.randint(1, 4))]
        expected = reference.of(salt).followers(context)
        assert native.of(salt).followers(context) == expected
        num_followers += len(expected)
    assert num_followers > 100


def test_the_native_memory_is_learnt_to_and_drafted_from_by_many_threads() -> None:
    memory, errors, ends = new_memory(2000), list[BaseException](), threading.Event()
    proposers = [suffix(SuffixConfig(), dependencies(memory=memory.of(salt))) for salt in "aabb"]

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
