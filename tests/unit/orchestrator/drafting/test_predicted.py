"""Predicted outputs: followed while they fit, found again after a divergence, given up when they never fit."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auditor.reference import decoding as reference
from orchestrator.core.context import Context
from orchestrator.core.drafting import Limits
from orchestrator.core.proposal import Budget
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.types import Acceptance
from orchestrator.drafting.lookup import Predicted, PredictedConfig
from tests.support.decode import decode, dependencies, observe
from tests.support.table_target import TableTarget

PROMPT = [90, 91]
WIDE = Budget(1000, 1000)


class Follow:
    """Runs the proposer against an output that is known beforehand, as a target that says just that would."""

    def __init__(self, prediction: list[int], output: list[int], **options: Any) -> None:
        self.proposer = Predicted(PredictedConfig(**options), dependencies(prediction=prediction))
        self.context = Context(PROMPT)
        self.drafts: list[list[int]] = []
        self.lengths: list[int] = []
        while len(self.context.output) < len(output):
            self.step(output)

    def step(self, output: list[int]) -> None:
        done = len(self.context.output)
        tree = self.proposer.propose(self.context, Sampling(), WIDE).tree
        draft = tree.tokens.tolist()
        rest = output[done:]
        accepted = 0
        while accepted < min(len(draft), len(rest) - 1) and draft[accepted] == rest[accepted]:
            accepted += 1
        acceptance = Acceptance(tuple(range(1, accepted + 1)), rest[accepted])
        self.context.commit(acceptance.tokens(tree))
        observe(self.proposer, tree, acceptance)
        self.drafts.append(draft)
        self.lengths.append(accepted + 1)


def test_prediction_that_is_right_is_followed_to_its_end() -> None:
    text = list(range(40))
    assert Follow(text, text, draft_len=9).lengths == [10, 10, 10, 10]
    assert Follow(text, [*text, 50, 51], draft_len=64).drafts == [text, []]


def test_one_token_replaced_costs_one_step() -> None:
    text = list(range(30))
    output = [*text[:10], 77, *text[11:]]
    run = Follow(text, output, draft_len=30)
    assert run.lengths == [11, 19] and run.drafts[1] == text[11:]


@pytest.mark.parametrize(
    ("output", "at_most"),
    [
        ([*range(10), 77, 78, 79, *range(10, 30)], 6),  # put in
        ([*range(10), *range(16, 30)], 3),  # left out
        ([*range(10), 77, 78, *range(11, 30)], 5),  # one for two
    ],
)
def test_prediction_is_found_again_after_a_divergence(output: list[int], at_most: int) -> None:
    run = Follow(list(range(30)), output, draft_len=30)
    assert run.context.output == output
    assert len(run.lengths) <= at_most and run.lengths[-1] >= 10


def test_of_several_places_the_nearest_to_where_the_output_should_be_is_taken() -> None:
    block = [1, 2, 3, 4]
    prediction = [*block, 10, *block, 20, *block, 30]
    output = [*block, 10, 7, *block, 20, *block, 30]  # something put in before the second block
    run = Follow(prediction, output, draft_len=20)
    assert sum(run.lengths) == len(output)
    assert run.lengths[-1] >= 9


def test_each_rejection_asks_for_a_longer_agreement_until_the_prediction_is_given_up() -> None:
    """An output over the same few tokens in another order agrees everywhere by chance."""
    rng = random.Random(1)
    prediction, output = ([rng.randint(0, 2) for _ in range(400)] for _ in range(2))
    run = Follow(prediction, output, max_ngram=3, draft_len=4)
    rejected = [bool(draft) and length == 1 for draft, length in zip(run.drafts, run.lengths, strict=True)]
    in_a_row = 0
    for draft, was_rejected in zip(run.drafts, rejected, strict=True):
        assert not (draft and in_a_row > 4), "more than max_ngram + 1 rejections in a row"
        in_a_row = in_a_row + 1 if was_rejected else 0 if draft else in_a_row
    unrelated = Follow([5, 6, 7, 8] * 50, [0, 1, 2, 3] * 50, max_ngram=3)
    assert sum(map(bool, unrelated.drafts)) == 2, "the first draft, and one as though a token had been replaced"


def test_given_up_is_for_good() -> None:
    prediction = [0, 1, 0, 2, 0, 3, 0, 4, 0, 5] * 4
    run = Follow(prediction, [0, 9] * 60, max_ngram=1)
    assert not any(run.drafts[-20:])


@given(
    st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 6)
)
def test_any_prediction_proposes_only_what_it_holds(prediction: list[int], output: list[int], max_ngram: int) -> None:
    run = Follow(prediction, output, max_ngram=max_ngram, draft_len=5)
    for draft in run.drafts:
        starts = range(len(prediction) - len(draft) + 1)
        assert len(draft) <= 5 and any(prediction[start : start + len(draft)] == draft for start in starts)


@given(st.integers(0, 6), st.integers(0, 6))
def test_prediction_stays_within_the_budget(max_nodes: int, max_depth: int) -> None:
    proposer = Predicted(PredictedConfig(), dependencies(prediction=[1, 2, 3, 4]))
    tree = proposer.propose(Context(PROMPT), Sampling(), Budget(max_nodes, max_depth)).tree
    assert tree.tokens.tolist() == [1, 2, 3, 4][: min(max_nodes, max_depth)]


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.9]),
    st.integers(1, 30),
    st.floats(0, 1),
    st.integers(1, 8),
)
def test_predicted_gives_the_reference_s_text_however_good_the_prediction(
    seed: int, temperature: float, max_tokens: int, noise: float, draft_len: int
) -> None:
    target, sampling, rng = TableTarget(6, table_seed=seed % 7), Sampling(temperature, seed=seed), random.Random(seed)
    prompt = [1, 2, 3]
    truth = reference.generate(target.logits, prompt, sampling, max_tokens)
    prediction = [rng.randrange(6) if rng.random() < noise else token for token in truth]
    proposer = Predicted(PredictedConfig(draft_len=draft_len), dependencies(prediction=prediction))
    said, statistics = decode(target, proposer, prompt, sampling, Limits(max_tokens, 10_000, 128))
    assert said == truth
    if prediction == truth:
        assert statistics.num_steps == -(-max_tokens // (draft_len + 1))
