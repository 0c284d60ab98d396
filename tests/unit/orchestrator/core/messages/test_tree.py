"""Trees from the wire: invalid ones are refused."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.errors import EngineError
from orchestrator.core.messages.target import unpack_step
from orchestrator.core.messages.tree import unpack_tree
from tests.unit.orchestrator.core.messages.strategies import MAX_NODES, VOCAB_SIZE, full_step

BAD_TREES = {
    "more parents than nodes": ([1, 2], [0], "must match"),
    "nodes without parents": ([1, 2], [], "must match"),
    "parents without nodes": ([], [0], "must match"),
    "a node that is its own parent": ([1, 2], [0, 2], "come before"),
    "a cycle": ([1, 2], [2, 1], "come before"),
    "a parent that comes later": ([1, 2, 3], [0, 3, 0], "come before"),
    "a parent that does not exist": ([1, 2], [0, 99], "come before"),
    "a parent below 0": ([1], [-1], "come before"),
    "an id below 0": ([-1], [0], "outside 0..49"),
    "an id beyond the vocabulary": ([50], [0], "outside 0..49"),
    "twins": ([1, 2, 1], [0, 0, 0], "same token"),
    "twins further down": ([1, 2, 3, 3], [0, 1, 2, 2], "same token"),
    "one node too many": ([*range(17)], [0] * 17, "at most 16"),
    "the largest numbers there are": ([2**31 - 1], [2**31 - 1], "outside"),
    "the smallest": ([-(2**31)], [-(2**31)], "outside"),
}


@pytest.mark.parametrize("name", BAD_TREES)
def test_invalid_tree_is_refused(name: str) -> None:
    ids, parents, reason = BAD_TREES[name]
    tensors = {
        "node_ids": np.array(ids, np.int32),
        "node_parents": np.array(parents, np.int32),
    }
    with pytest.raises(EngineError, match=reason):
        unpack_tree(tensors, VOCAB_SIZE, MAX_NODES)
    with pytest.raises(EngineError, match=reason):
        unpack_step(full_step() | tensors, VOCAB_SIZE, MAX_NODES)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(-2, VOCAB_SIZE + 1), st.integers(-2, 9)), max_size=8))
def test_accepted_trees_keep_the_invariants(nodes: list[tuple[int, int]]) -> None:
    ids, parents = (np.array([node[i] for node in nodes], np.int32) for i in (0, 1))
    valid = all(0 <= token < VOCAB_SIZE and 0 <= parent <= i for i, (token, parent) in enumerate(nodes)) and len(
        {(parent, token) for token, parent in nodes}
    ) == len(nodes)
    try:
        tree = unpack_tree({"node_ids": ids, "node_parents": parents}, VOCAB_SIZE, MAX_NODES)
    except EngineError:
        assert not valid
    else:
        assert valid
        assert sum(len(below) for below in tree.children) == tree.num_nodes


def test_a_million_nodes_are_refused_at_once() -> None:
    many = np.zeros(10**6, np.int32)
    began_s = time.monotonic()
    with pytest.raises(EngineError, match="1000000 nodes, at most 16"):
        unpack_tree({"node_ids": many, "node_parents": many}, VOCAB_SIZE, MAX_NODES)
    assert time.monotonic() - began_s < 0.5
