"""Acceptance and the reference: whatever the tree, the text is the one that the target alone would say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auditor.reference import decoding as reference
from orchestrator.core.accept import accept_coupled
from orchestrator.core.context import Context
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import StepOptions
from tests.support.table_target import TableTarget
from tests.unit.orchestrator.core.test_tree import TREE, trees


@pytest.mark.parametrize(
    ("target_tokens", "path", "next_token"),
    [
        ([5, 6, 0, 0, 9, 0], (1, 4), 9),
        ([7, 0, 8, 0, 0, 3], (2, 5), 3),
        ([5, 8, 0, 0, 0, 0], (1,), 8),
        ([6, 5, 5, 5, 5, 5], (), 6),
    ],
)
def test_the_accepted_path_follows_the_target_tokens(
    target_tokens: list[int], path: tuple[int, ...], next_token: int
) -> None:
    assert accept_coupled(TREE, target_tokens) == (path, next_token)


def run_with_random_trees(target: TableTarget, sampling: Sampling, forest: list[TokenTree]) -> list[int]:
    context = Context([1, 2, 3])
    for tree in forest:
        context.commit(target.step(context, tree, sampling, StepOptions()).tokens(tree))
    return context.output


@settings(deadline=None)
@given(st.lists(trees(), min_size=1, max_size=8), st.integers(0, 2**64 - 1), st.sampled_from([0.0, 0.7, 1.5]))
def test_any_trees_give_the_reference_s_text(forest: list[TokenTree], seed: int, temperature: float) -> None:
    target = TableTarget(vocab_size=6)
    sampling = Sampling(temperature, top_p=0.9, seed=seed)
    output = run_with_random_trees(target, sampling, forest)
    assert output == reference.generate(target.logits, [1, 2, 3], sampling, len(output))


def test_deep_acceptance_happens() -> None:
    """A tree that holds the reference's own text is accepted whole, so the law above is not vacuous."""
    target, sampling = TableTarget(vocab_size=6), Sampling(0.9, seed=5)
    truth = reference.generate(target.logits, [1, 2, 3], sampling, 6)
    acceptance = target.step(Context([1, 2, 3]), TokenTree.chain(truth[:5]), sampling, StepOptions(True, True))
    assert acceptance.path == (1, 2, 3, 4, 5)
    assert acceptance.next_token == truth[5]
    assert acceptance.target_tokens is not None and acceptance.target_tokens.tolist() == truth
    assert acceptance.logprobs is not None and (acceptance.logprobs < 0).all()


def test_reference_stops_at_a_stop_id() -> None:
    target = TableTarget(vocab_size=4, script={(1,): 2, (1, 2): 3, (1, 2, 3): 0})
    assert reference.generate(target.logits, [1], Sampling(), 9, stop_ids={3}) == [2, 3]
    assert np.isfinite(target.logits([1])).all()
