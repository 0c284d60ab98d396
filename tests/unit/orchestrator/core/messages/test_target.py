"""Target steps and their answers: they survive the wire, and invalid ones are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.context import Context
from orchestrator.core.errors import EngineError
from orchestrator.core.messages.context import Delta, delta_of
from orchestrator.core.messages.target import StepRequest, pack_acceptance, pack_step, unpack_acceptance, unpack_step
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, Distribution, StepOptions
from tests.unit.orchestrator.core.messages.strategies import (
    MAX_NODES,
    VOCAB_SIZE,
    acceptances,
    crossed,
    deltas,
    ids_of,
    same,
    sampled_q,
    samplings,
    step_options,
    trees,
)


@settings(max_examples=100, deadline=None)
@given(deltas(), trees, samplings, step_options, st.integers(1, 10**7), st.data())
def test_unpacked_step_equals_the_packed_one(
    delta: Delta, tree: TokenTree, sampling: Sampling, options: StepOptions, deadline_ms: int, data: st.DataObject
) -> None:
    q = data.draw(st.one_of(st.just(()), sampled_q(tree)))
    request = StepRequest(delta, tree, sampling, options, deadline_ms, q)
    back = unpack_step(crossed(pack_step(request)), VOCAB_SIZE, MAX_NODES)
    assert same(request, back)
    assert back.delta.prefix_len == delta.prefix_len


@settings(max_examples=100, deadline=None)
@given(acceptances())
def test_unpacked_acceptance_equals_the_packed_one(case: tuple[TokenTree, Acceptance]) -> None:
    tree, acceptance = case
    assert same(acceptance, unpack_acceptance(crossed(pack_acceptance(acceptance)), tree))


@pytest.mark.parametrize(
    ("q", "words"),
    [
        ([([1], [1.0])], "1 distributions q for 2 nodes"),
        ([([1], [1.0]), ([3], [1.0])], "q of node 2 does not contain the node.s token"),
        ([([1, 2], [1.0, 0.0]), ([2], [1.0])], "q of node 1 has a weight that is not a positive number"),
        ([([1, 2], [1.0, float("nan")]), ([2], [1.0])], "q of node 1 has a weight"),
        ([([2, 1], [1.0, 1.0]), ([2], [1.0])], "q of node 1 must have ascending ids in 0..49"),
        ([([1, 50], [1.0, 1.0]), ([2], [1.0])], "q of node 1 must have ascending ids in 0..49"),
        ([([1, 2], [1.0, 1.0]), ([1, 2], [1.0, 2.0])], "the q of node 2 differs from that of its siblings"),
    ],
)
def test_invalid_q_is_refused(q: list[tuple[list[int], list[float]]], words: str) -> None:
    """Two children of the root, 1 and 2."""
    tree = TokenTree.from_paths([[1], [2]])
    distributions = tuple(Distribution(ids_of(*ids), np.array(weights, np.float32)) for ids, weights in q)
    delta = delta_of(Context([1, 2]), 0, 1, "")
    step = StepRequest(delta, tree, Sampling(), StepOptions(), 1000, distributions)
    with pytest.raises(EngineError, match=words):
        unpack_step(pack_step(step), VOCAB_SIZE, MAX_NODES)


#      0
#     / \
#    1   3      its paths are 1-2, 3-4-5 and their prefixes
#    |   |
#    2   4-5
FORK = TokenTree.from_paths([[10, 11], [12, 13, 14]])


PATHS = {(), (1,), (1, 2), (3,), (3, 4), (3, 4, 5)}


@pytest.mark.parametrize(
    "path",
    [*sorted(PATHS), (0,), (2,), (1, 3), (3, 5), (1, 2, 3), (3, 4, 5, 5), (1, 1), (-1,), (6,), (4, 3), (3, 4, 2)],
)
def test_path_outside_the_tree_is_refused(path: tuple[int, ...]) -> None:
    tensors = {"next_token": np.array([1], np.int32), "path": np.array(path, np.int32)}
    if path in PATHS:
        assert unpack_acceptance(tensors, FORK).path == path
    else:
        with pytest.raises(EngineError, match="not a path of the tree"):
            unpack_acceptance(tensors, FORK)
