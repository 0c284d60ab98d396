"""Packed tree masks of compiled engines: against a construction bit by bit, and by hand."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.errors import EngineError
from orchestrator.core.tree import TokenTree
from runtime.trtllm.trees.packed_mask import (
    GENERATION_LENGTHS,
    PACKED_MASK,
    POSITION_OFFSETS,
    USE,
    num_words,
    pack_trees,
)

FACTS = json.loads((Path(__file__).resolve().parents[3] / "data/trtllm/engine_inputs.json").read_text())

#          0            0 sees 0
#        /   \          1 sees 0, 1          2 sees 0, 2
#       1     2
#      / \     \        3 sees 0, 1, 3       4 sees 0, 1, 4
#     3   4     5       5 sees 0, 2, 5
FORK = TokenTree(np.array([5, 7, 5, 6, 8], np.int32), np.array([0, 0, 1, 1, 2], np.int32))
FORK_ROWS = [0b000001, 0b000011, 0b000101, 0b001011, 0b010011, 0b100101]


def tree_of(parents):
    return TokenTree(np.arange(len(parents), dtype=np.int32), np.array(parents, np.int32))


def grown(num_nodes, seed):
    """Grow a tree at random: each node below any one before it."""
    rng = random.Random(seed)
    return tree_of([rng.randrange(node + 1) for node in range(num_nodes)])


def rows_bit_by_bit(tree, max_draft_len):
    """Build a tree's rows from each node's walk up to the root, in Python's own integers."""
    parents = [-1, *tree.parents.tolist()]
    rows = []
    for node in range(len(parents)):
        words = [0] * ((max_draft_len + 1 + 31) // 32)
        while node >= 0:
            words[node // 32] |= 1 << node % 32
            node = parents[node]
        rows.append([word - (1 << 32) if word >> 31 else word for word in words])
    return rows


def test_packed_fork_is_the_one_worked_out_by_hand():
    packed = pack_trees([FORK], 5)
    assert packed[PACKED_MASK].tolist() == [[row] for row in FORK_ROWS]
    assert packed[POSITION_OFFSETS].tolist() == [[0, 1, 1, 2, 2, 2]]
    assert packed[GENERATION_LENGTHS].tolist() == [6]
    assert packed[USE].tolist() == [1]


def test_packed_trees_stand_below_one_another_and_only_offsets_are_padded():
    packed = pack_trees([TokenTree.bare(), FORK, TokenTree.chain([4, 4])], 40)
    assert packed[PACKED_MASK].tolist() == [[row, 0] for row in [1, *FORK_ROWS, 1, 3, 7]]
    assert packed[POSITION_OFFSETS].tolist() == [[0] * 6, [0, 1, 1, 2, 2, 2], [0, 1, 2, 0, 0, 0]]
    assert packed[GENERATION_LENGTHS].tolist() == [1, 6, 3]


@pytest.mark.parametrize("num_nodes", [0, 1, 31, 32, 63, 64, 128])
def test_packed_chain_has_the_published_rows(num_nodes):
    assert FACTS["chain_row_value"] == "(1<<(i+1))-1"
    mask = pack_trees([TokenTree.chain(range(num_nodes))], 128)[PACKED_MASK]
    for i, words in enumerate(mask.view(np.uint32).tolist()):
        assert sum(word << 32 * w for w, word in enumerate(words)) == (1 << (i + 1)) - 1


def test_bit_31_is_the_sign():
    mask = pack_trees([TokenTree.chain(range(32))], 63)[PACKED_MASK]
    assert mask[31].tolist() == [-1, 0]
    assert mask[32].tolist() == [-1, 1]
    alone = tree_of([0] * 31)
    assert pack_trees([alone], 63)[PACKED_MASK][31].tolist() == [-(2**31) + 1, 0]


@pytest.mark.parametrize(
    ("max_draft_len", "words"), [(1, 1), (31, 1), (32, 2), (63, 2), (64, 3), (83, 3), (128, 5), (256, 9)]
)
def test_row_has_a_word_for_each_32_tokens_the_root_included(max_draft_len, words):
    assert num_words(max_draft_len) == words
    assert pack_trees([FORK], max(max_draft_len, 5))[PACKED_MASK].shape == (6, num_words(max(max_draft_len, 5)))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 128), st.integers(0, 1 << 32)), min_size=1, max_size=5))
def test_packed_random_trees_equal_those_built_bit_by_bit(shapes):
    trees = [grown(*shape) for shape in shapes]
    packed = pack_trees(trees, 128)
    assert packed[PACKED_MASK].tolist() == [row for tree in trees for row in rows_bit_by_bit(tree, 128)]
    assert [row[row > 0].size + 1 for row in packed[POSITION_OFFSETS]] == packed[GENERATION_LENGTHS].tolist()


def test_packed_tree_of_medusas_published_size_fits_two_words():
    # mc_sim_7b_63 has 10, 28, 23 and 2 nodes at depths 1 to 4; which node hangs below which is not in our sources,
    # and the counts alone fix the number of set bits: 1 + 10 x 2 + 28 x 3 + 23 x 4 + 2 x 5.
    counts, parents, level = [10, 28, 23, 2], [], [0]
    for count in counts:
        first = len(parents) + 1
        parents += [level[i * len(level) // count] for i in range(count)]
        level = list(range(first, first + count))
    packed = pack_trees([tree_of(parents)], 63)
    assert packed[PACKED_MASK].shape == (64, 2)
    assert sum(word.bit_count() for row in packed[PACKED_MASK].view(np.uint32).tolist() for word in row) == 207
    assert np.bincount(packed[POSITION_OFFSETS][0]).tolist() == [1, *counts]


def test_names_types_and_shapes_are_those_of_the_engine():
    trees, max_draft_len = [grown(9, 1), grown(40, 2), TokenTree.bare()], 83
    packed = pack_trees(trees, max_draft_len)
    lengths = [tree.num_nodes + 1 for tree in trees]
    sizes = {"B": 3, "max_gen_len": max(lengths), "sum(generation_lengths)": sum(lengths)}
    sizes["ceil((max_draft_len+1)/32)"] = 3
    assert list(packed) == [given["name"] for given in FACTS["inputs"]]
    for given_input in FACTS["inputs"]:
        tensor = packed[given_input["name"]]
        assert given_input["dtype"] == "INT32" and tensor.dtype == np.int32
        assert tensor.shape == tuple(sizes.get(size, size) for size in given_input["shape"])


def test_step_without_drafts_does_not_use_the_mask():
    packed = pack_trees([TokenTree.bare(), TokenTree.bare()], 8)
    assert packed[USE].tolist() == [0]
    assert packed[PACKED_MASK].tolist() == [[1], [1]]
    assert packed[POSITION_OFFSETS].tolist() == [[0], [0]]


def test_step_that_the_engine_cannot_take_is_refused():
    with pytest.raises(EngineError, match="a tree has 6 nodes, the engine takes at most 5"):
        pack_trees([FORK, TokenTree.chain(range(6))], 5)
    with pytest.raises(EngineError, match="at least one tree"):
        pack_trees([], 5)
