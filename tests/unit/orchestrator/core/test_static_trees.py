"""Static trees: the same from nodes or leaves, the published ones, the search, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from orchestrator.core.arrays import FloatArray
from orchestrator.core.errors import RequestError
from orchestrator.core.static_trees import EAGLE_LEAVES, best_choices, read_choices, tree_of_choices
from orchestrator.core.tree import TokenTree
from tests.support.choice_trees import published_choices
from tests.support.choice_trees import tree_of_choices as independent_tree


@pytest.mark.parametrize(("name", "depths"), [("medusa_mc_sim_7b_63", [10, 28, 23, 2]), ("eagle1_25", [4, 8, 8, 3, 2])])
def test_published_trees_equal_an_independent_construction(name: str, depths: list[int]) -> None:
    ours, theirs = tree_of_choices(published_choices(name)), independent_tree(published_choices(name))
    assert np.bincount(ours.depths)[1:].tolist() == theirs.depth_counts == depths
    assert ours.parents.tolist() == theirs.parents
    assert ours.depths.tolist() == theirs.depths
    assert ours.mask.tolist() == theirs.mask
    assert ours.paths == list(theirs.addresses)


def test_eagle_s_default_is_its_published_tree() -> None:
    assert tree_of_choices(EAGLE_LEAVES).paths == tree_of_choices(published_choices("eagle1_25")).paths


def every_tree(num_nodes: int, depth: int, width: int) -> list[frozenset[tuple[int, ...]]]:
    """All sets of nodes that hold the parent of each."""
    nodes = [node for level in range(1, depth + 1) for node in itertools.product(range(width), repeat=level)]
    return [
        frozenset(chosen)
        for chosen in itertools.combinations(nodes, num_nodes)
        if all(len(node) == 1 or node[:-1] in chosen for node in chosen)
    ]


def expected_length(tree: TokenTree, accuracy: FloatArray) -> float:
    """Return the expected tokens of a step, the target's own one included; accuracy: as in `best_choices`."""
    reached = np.ones(tree.num_nodes + 1)
    for node, (rank, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True), start=1):
        reached[node] = reached[parent] * accuracy[tree.depths[node] - 1, rank]
    return float(reached.sum())


@pytest.mark.parametrize("seed", range(5))
def test_the_search_finds_the_best_tree_of_each_size(seed: int) -> None:
    rng = np.random.default_rng(seed)
    accuracy = -np.sort(-rng.dirichlet(np.ones(4), 3)[:, :3], axis=1)
    for num_nodes in range(1, 5):
        best = max(expected_length(tree_of_choices(list(tree)), accuracy) for tree in every_tree(num_nodes, 3, 3))
        found = best_choices(accuracy, num_nodes)
        assert found.num_nodes == num_nodes
        assert expected_length(found, accuracy) == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("0,0", "list of lists"),
        ([0, 1], "list of lists"),
        ([[0], [True]], "ranks in 0..63"),
        ([[64]], "ranks in 0..63"),
        ([[-1]], "ranks in 0..63"),
        ([[0.0]], "ranks in 0..63"),
        ([[]], "1..16 ranks"),
        ([[0] * 17], "1..16 ranks"),
        ([[a, b] for a in range(11) for b in range(11)], "132 nodes, at most 128"),
        ([[0]] * 129, "129 lists, at most 128"),
        ([[0] * 16] * 100_000, "100000 lists"),
    ],
)
def test_what_is_no_tree_is_refused(value: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        read_choices("choices", value, "input speculation_config")
