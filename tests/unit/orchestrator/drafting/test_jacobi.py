"""Jacobi: the guesses and the passes of the textbook iteration, and the text the target's own."""

from __future__ import annotations

from itertools import cycle, islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auditor.reference import decoding as reference
from auditor.reference.distribution import sample
from orchestrator.core.context import Context
from orchestrator.core.drafting import Limits
from orchestrator.core.proposal import Budget
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.types import Acceptance
from orchestrator.drafting.jacobi import Jacobi, JacobiConfig, filled, spare_tokens
from tests.support.decode import decode, dependencies, observe
from tests.support.table_target import TableTarget

WIDE = Budget(1000, 1000)
PROMPT = [1, 2, 3, 1]


def jacobi(draft_len: int) -> Jacobi:
    return Jacobi(JacobiConfig.model_construct(draft_len=draft_len), dependencies())


def answer(target: TableTarget, ids: list[int], sampling: Sampling) -> int:
    """What the target says after `ids`: the right-hand side of one equation."""
    return int(sample(target.logits(ids)[None, :], np.array([len(ids)]), sampling)[0])


def textbook(target: TableTarget, prompt: list[int], guess: list[int], sampling: Sampling) -> list[list[int]]:
    """The iterates of y_i = sample(x, y_<i), all unknowns replaced at once, until a pass changes none (it counts too)."""
    iterates = [guess]
    while len(iterates) < 2 or iterates[-1] != iterates[-2]:
        y = iterates[-1]
        iterates.append([answer(target, [*prompt, *y[:i]], sampling) for i in range(len(y))])
    return iterates


def step(proposer: Jacobi, context: Context, target: TableTarget, sampling: Sampling, budget: Budget = WIDE) -> None:
    tree = proposer.propose(context, sampling, budget).tree
    acceptance = target.step(context, tree, sampling, proposer.needs)
    context.commit(acceptance.tokens(tree))
    observe(proposer, tree, acceptance)


targets = st.builds(TableTarget, st.integers(2, 8), st.integers(1, 3), st.integers(0, 10**6), st.just(1.5))
samplings = st.builds(Sampling, st.sampled_from([0.0, 0.9]), seed=st.integers(0, 2**64 - 1))


@settings(deadline=None)
@given(targets, samplings, st.lists(st.integers(0, 1), min_size=1, max_size=5), st.integers(1, 8))
def test_jacobi_guesses_and_passes_equal_the_textbook_s(
    target: TableTarget, sampling: Sampling, prompt: list[int], num_unknowns: int
) -> None:
    """The committed tokens and the guesses after them, read from the first unknown on, are the textbook's iterate."""
    iterates = textbook(target, prompt, list(islice(cycle(prompt), num_unknowns)), sampling)
    proposer, context = jacobi(num_unknowns), Context(prompt)
    for number, iterate in enumerate(iterates[1:], start=1):
        assert len(context.output) <= num_unknowns  # the textbook is not done either
        step(proposer, context, target, sampling)
        assert [*context.output, *proposer._guesses][:num_unknowns] == iterate
        assert len(context.output) >= number
    assert len(context.output) > num_unknowns
    assert context.output == reference.generate(target.logits, prompt, sampling, len(context.output))


@settings(deadline=None)
@given(targets, samplings, st.integers(1, 6), st.lists(st.integers(0, 8), min_size=1, max_size=10))
def test_jacobi_guesses_stay_at_their_absolute_positions(
    target: TableTarget, sampling: Sampling, draft_len: int, max_depths: list[int]
) -> None:
    """The same iteration written over {position: guess}; a guess that no pass has seen stays as it is."""
    proposer, context = jacobi(draft_len), Context(PROMPT)
    guesses: dict[int, int] = {}
    spare, text = cycle(PROMPT), list(PROMPT)
    for max_depth in max_depths:
        first, seen = len(text), min(draft_len, max_depth)
        for position in range(first, first + draft_len):
            if position not in guesses:
                guesses[position] = next(spare)
        answers = {
            position: answer(target, [*text, *(guesses[p] for p in range(first, position))], sampling)
            for position in range(first, first + seen + 1)
        }
        right = first
        while right < first + seen and guesses[right] == answers[right]:
            right += 1
        guesses |= answers
        text += [guesses[position] for position in range(first, right + 1)]

        step(proposer, context, target, sampling, Budget(99, max_depth))
        assert context.ids == text
        assert proposer._guesses == [guesses[p] for p in range(len(text), first + draft_len + 1) if p in guesses]


def test_jacobi_by_hand() -> None:
    proposer, context = jacobi(4), Context([7, 8, 9])
    tree = proposer.propose(context, Sampling(), WIDE).tree
    assert tree.tokens.tolist() == [7, 8, 9, 7] and tree.is_chain
    # 7 and 8 were right, 9 should be 5; the answers after it keep their places: 4 after 9, 3 after 7.
    observe(proposer, tree, Acceptance((1, 2), 5, np.array([7, 8, 5, 4, 3], np.int32)))
    tree = proposer.propose(context, Sampling(), WIDE).tree
    assert tree.tokens.tolist() == [4, 3, 8, 9]  # the prompt goes on where it was left
    tree = proposer.propose(context, Sampling(), Budget(99, 1)).tree
    assert tree.tokens.tolist() == [4]
    observe(proposer, tree, Acceptance((), 6, np.array([6, 2], np.int32)))
    assert proposer.propose(context, Sampling(), Budget(2, 99)).tree.tokens.tolist() == [2, 8]
    assert proposer._guesses == [2, 8, 9, 7]


def test_jacobi_answer_without_picks_moves_the_guesses_all_the_same() -> None:
    proposer, context = jacobi(3), Context([7, 8, 9])
    tree = proposer.propose(context, Sampling(), WIDE).tree
    observe(proposer, tree, Acceptance((1,), 5))
    assert proposer._guesses == [9]


def test_filled_takes_what_is_missing_from_the_prompt_in_order() -> None:
    spare = spare_tokens("prompt", Context([1, 2, 3]), 0)
    assert filled([9], 3, spare) == [9, 1, 2]
    assert filled([9, 8], 1, spare) == [9]
    assert filled([], 4, spare) == [3, 1, 2, 3]


def test_random_guesses_come_from_the_whole_text_and_from_the_seed() -> None:
    context = Context([1, 2, 3])
    first, again, other = (spare_tokens("random", context, seed) for seed in (7, 7, 8))
    drawn = [list(islice(each, 40)) for each in (first, again, other)]
    assert drawn[0] == drawn[1] != drawn[2] and set(drawn[0]) == {1, 2, 3} and drawn[0] != [1, 2, 3] * 13 + [1]
    context.commit([9] * 100)
    assert 9 in islice(first, 40)


@settings(deadline=None)
@given(samplings, st.integers(1, 10))
def test_jacobi_with_random_guesses_gives_the_reference_s_text(sampling: Sampling, draft_len: int) -> None:
    target = TableTarget(6, table_seed=sampling.seed % 7)
    runs = [
        decode(target, Jacobi(config, dependencies()), PROMPT, sampling, Limits(20, 1000, 128))
        for config in [JacobiConfig(draft_len=draft_len, fill="random")] * 2
    ]
    assert runs[0][0] == runs[1][0] == reference.generate(target.logits, PROMPT, sampling, 20)
    assert runs[0][1].num_steps == runs[1][1].num_steps


@settings(deadline=None)
@given(
    samplings,
    st.integers(0, 10),
    st.integers(1, 30),
    st.integers(0, 12),
    st.integers(-3, 3),
    st.frozensets(st.integers(0, 5), max_size=1),
)
def test_jacobi_gives_the_reference_s_text(
    sampling: Sampling, draft_len: int, max_tokens: int, max_nodes: int, spare_positions: int, stop_ids: frozenset[int]
) -> None:
    target = TableTarget(6, table_seed=sampling.seed % 7)
    limits = Limits(max_tokens, len(PROMPT) + max(max_tokens + spare_positions, 0), max_nodes)
    said, _ = decode(target, jacobi(draft_len), PROMPT, sampling, limits, stop_ids)
    assert said == reference.generate(target.logits, PROMPT, sampling, max_tokens, stop_ids)


@pytest.mark.parametrize(("temperature", "most_steps"), [(0.0, 60), (0.5, 80)])
def test_jacobi_language_of_short_memory_takes_fewer_steps_than_tokens(temperature: float, most_steps: int) -> None:
    """So the law above is not vacuous: where few tokens decide the next, wrong guesses soon agree with right ones."""
    target = TableTarget(4, order=1, table_seed=1, sharpness=3.0)
    _, statistics = decode(target, jacobi(8), [1, 2, 3], Sampling(temperature, seed=1), Limits(100, 10_000, 128))
    assert statistics.num_steps <= most_steps
    assert statistics.sources["jacobi"].num_accepted >= 100 - most_steps
