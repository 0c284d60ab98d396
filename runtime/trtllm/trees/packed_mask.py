"""Token trees as the mask inputs of a compiled TensorRT-LLM engine, and back; numpy, knows no engine.

EXPERIMENTAL: the layout is taken from TensorRT-LLM's sources (up to 1.2.1, generation_mixin.py); nothing here has been
run on an engine. An engine has these inputs when it is built with max_draft_len > 0 in a mode other than
draft_tokens_external; trees of different sizes in one step need the mode lookahead_decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from orchestrator.core.errors import EngineError
from orchestrator.core.tree import BoolArray, TokenTree
from orchestrator.wire.tensors import Incoming, Tensors

GENERATION_LENGTHS = "spec_decoding_generation_lengths"
POSITION_OFFSETS = "spec_decoding_position_offsets"
PACKED_MASK = "spec_decoding_packed_mask"
USE = "spec_decoding_use"

_WORD_BITS = 32
# Bit 31 is the sign of an int32: words are made as unsigned ones, in the byte order that packbits writes.
_WORD = np.dtype("<u4")


def pack_trees(trees: Sequence[TokenTree], max_draft_len: int) -> Tensors:
    """Return the four inputs of one step, all int32, for B trees of T = 1 + nodes tokens each, the root being node 0.

    max_draft_len: what the engine was built for.
    Returns:
        spec_decoding_generation_lengths: (B,) — T of each tree.
        spec_decoding_position_offsets: (B, largest T) — the depth of each node; 0 behind the last one (inferred).
        spec_decoding_packed_mask: (sum of T, words) — the rows of all trees one below the other, not padded; law: bit j
            of word w in row i is set exactly when node i sees node 32 w + j of its own tree, itself included.
        spec_decoding_use: (1,) — 1, or 0 when no tree has a draft; the one input that stays in host memory.
    Raises EngineError: no trees, or one larger than the engine takes.
    """
    _check_sizes(trees, max_draft_len)
    lengths = np.array([tree.num_nodes + 1 for tree in trees], np.int32)  # (B,)
    words = num_words(max_draft_len)
    return {
        GENERATION_LENGTHS: lengths,
        POSITION_OFFSETS: _position_offsets(trees, int(lengths.max())),
        PACKED_MASK: np.concatenate([pack_mask(tree.mask, words) for tree in trees]),
        USE: np.array([lengths.max() > 1], np.int32),
    }


def unpack_trees(tensors: Incoming) -> list[npt.NDArray[np.int32]]:
    """Return the parents of each tree, (T,) int32 with the root's -1 first, from what `pack_trees` made.

    Invariant: unpack_trees(pack_trees(trees, n))[b][1:] == trees[b].parents.
    Raises EngineError when rows and lengths do not fit, or a row is none of a tree's.
    """
    lengths = tensors[GENERATION_LENGTHS].tolist()
    if sum(lengths) != len(tensors[PACKED_MASK]):
        raise EngineError(f"{PACKED_MASK} has {len(tensors[PACKED_MASK])} rows, the lengths add up to {sum(lengths)}")
    rows = np.split(tensors[PACKED_MASK], np.cumsum(lengths)[:-1])
    return [parents_of(unpack_mask(part)) for part in rows]


def num_words(max_draft_len: int) -> int:
    """Return the words of a row: ceil((max_draft_len + 1) / 32)."""
    return -(-(max_draft_len + 1) // _WORD_BITS)


def pack_mask(mask: BoolArray, words: int) -> npt.NDArray[np.int32]:
    """Pack a tree mask, (T, T) bool with T <= 32 words, into (T, words) int32; unpack_mask gives it back."""
    padded = np.zeros((len(mask), words * _WORD_BITS), np.bool_)
    padded[:, : len(mask)] = mask
    return np.packbits(padded, axis=1, bitorder="little").view(_WORD).astype(np.uint32).view(np.int32)


def unpack_mask(rows: npt.NDArray[np.int32]) -> BoolArray:
    """Return the tree mask, (T, T) bool, of packed rows, (T, words) int32; EngineError for a bit beyond column T."""
    as_bytes = np.ascontiguousarray(rows).view(np.uint32).astype(_WORD).view(np.uint8)
    bits = np.unpackbits(as_bytes, axis=1, bitorder="little").astype(np.bool_)
    if bits[:, len(rows) :].any():
        raise EngineError(f"a packed mask of {len(rows)} rows has a bit beyond them")
    return bits[:, : len(rows)]


def parents_of(mask: BoolArray) -> npt.NDArray[np.int32]:
    """Return (T,) int32, parents[0] == -1, of a tree mask; raises EngineError when it is none.

    A node's ancestors stand before it in the order of their depth, so its parent is the last of them.
    """
    below = np.tril(mask, -1)
    columns = np.where(below, np.arange(len(mask)), -1)
    parents = columns.max(axis=1, initial=-1).astype(np.int32)
    rootless = (parents[1:] < 0).any()
    if rootless or not np.array_equal(TokenTree(np.zeros_like(parents[1:]), parents[1:]).mask, mask):
        raise EngineError("a packed mask is none of a token tree with its root as node 0")
    return parents


def _position_offsets(trees: Sequence[TokenTree], longest: int) -> npt.NDArray[np.int32]:
    offsets = np.zeros((len(trees), longest), np.int32)
    for row, tree in zip(offsets, trees, strict=True):
        row[: tree.num_nodes + 1] = tree.depths
    return offsets


def _check_sizes(trees: Sequence[TokenTree], max_draft_len: int) -> None:
    if not trees:
        raise EngineError("a step needs at least one tree, got none")
    largest = max(tree.num_nodes for tree in trees)
    if largest > max_draft_len:
        raise EngineError(f"a tree has {largest} nodes, the engine takes at most {max_draft_len} (its max_draft_len)")
