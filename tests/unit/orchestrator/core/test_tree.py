"""The token tree: what is derived from `parents`, and which trees from outside are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.errors import EngineError
from orchestrator.core.tree import TokenTree, TreeBuilder

#        root
#       /    \
#      5      7
#     / \     |
#    5   6    8
TREE = TokenTree(np.array([5, 7, 5, 6, 8], np.int32), np.array([0, 0, 1, 1, 2], np.int32))
MASK = """
T.....
TT....
T.T...
TT.T..
TT..T.
T.T..T
"""


def trees(max_nodes: int = 12, vocab_size: int = 6) -> st.SearchStrategy[TokenTree]:
    """Random trees, grown from random paths."""
    path = st.lists(st.integers(0, vocab_size - 1), max_size=5)
    return st.lists(path, max_size=6).map(TokenTree.from_paths).map(lambda t: t.only(t.within(max_nodes, 99)))


def test_mask_drawn_by_hand() -> None:
    drawn = [[cell == "T" for cell in row] for row in MASK.split()]
    assert TREE.mask.tolist() == drawn
    assert TREE.depths.tolist() == [0, 1, 1, 2, 2, 2]


def test_children_keep_the_order_in_which_they_are_tried() -> None:
    assert TREE.children == [{5: 1, 7: 2}, {5: 3, 6: 4}, {8: 5}, {}, {}, {}]


def test_from_paths_merges_common_prefixes() -> None:
    tree = TokenTree.from_paths([[5, 5], [5, 6], [7, 8]])
    assert tree.tokens.tolist() == [5, 5, 6, 7, 8]
    assert tree.parents.tolist() == [0, 1, 1, 0, 4]


def test_builder_shares_nodes_and_leaves_out_what_exceeds_its_limits() -> None:
    builder = TreeBuilder(max_nodes=4, max_depth=2)
    assert builder.add_path(0, [5, 6]) == 2
    assert builder.add_path(0, [5, 6, 7]) is None  # too deep
    assert builder.add_path(0, [5, 7]) == 3 and builder.add_path(None, [5]) is None
    assert builder.add_path(0, [8, 9]) is None  # one node is left for two tokens
    assert builder.add_path(0, [5, 6]) == builder.add(1, 6) == 2
    tree = builder.build()
    assert (tree.tokens.tolist(), tree.parents.tolist()) == ([5, 6, 7, 8], [0, 1, 1, 0])


def test_chain_is_a_chain_and_a_fork_is_not() -> None:
    assert TokenTree.chain([3, 3, 3]).is_chain
    assert TokenTree.bare().is_chain
    assert not TREE.is_chain


@given(trees())
def test_mask_law_holds(tree: TokenTree) -> None:
    for node, parent in enumerate(tree.parents.tolist(), start=1):
        expected = tree.mask[parent].copy()
        expected[node] = True
        assert (tree.mask[node] == expected).all()
    assert (tree.mask.sum(axis=1) == tree.depths + 1).all()


@given(trees(), st.integers(0, 12), st.integers(0, 5))
def test_cut_leaves_a_tree_within_the_budget(tree: TokenTree, max_nodes: int, max_depth: int) -> None:
    cut = tree.only(tree.within(max_nodes, max_depth))
    TokenTree.checked(cut.tokens, cut.parents, 6, max_nodes)
    assert cut.depths.max() <= max_depth
    shallow = int((tree.depths[1:] <= max_depth).sum())
    assert cut.num_nodes == min(max_nodes, shallow)


@pytest.mark.parametrize(
    ("tokens", "parents", "reason"),
    [
        ([1, 2], [0], "must match"),
        ([1, 2, 3, 4, 5], [0, 1, 2, 3, 4], "at most 4"),
        ([1, 9], [0, 1], "outside 0..8"),
        ([-1], [0], "outside 0..8"),
        ([1, 2], [2, 0], "before its child"),
        ([1, 2], [0, 2], "before its child"),
        ([1], [-1], "before its child"),
        ([3, 3], [0, 0], "same token"),
    ],
)
def test_checked_refuses_what_breaks_a_law(tokens: list[int], parents: list[int], reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        TokenTree.checked(np.array(tokens, np.int32), np.array(parents, np.int32), 9, 4)
