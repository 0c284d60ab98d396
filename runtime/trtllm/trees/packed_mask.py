"""Token trees as the mask inputs of a compiled TensorRT-LLM engine; numpy only, knows no engine.

EXPERIMENTAL: the layout is taken from TensorRT-LLM's sources (up to 1.2.1, generation_mixin.py); nothing here has run
on an engine. An engine has these inputs when it is built with max_draft_len > 0 in a mode other than
draft_tokens_external; trees of different sizes in one step need the mode lookahead_decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from orchestrator.core.errors import EngineError
from orchestrator.core.tree import BoolArray, TokenTree
from orchestrator.wire.tensors import Tensors

GENERATION_LENGTHS = "spec_decoding_generation_lengths"
POSITION_OFFSETS = "spec_decoding_position_offsets"
PACKED_MASK = "spec_decoding_packed_mask"
USE = "spec_decoding_use"

_WORD_BITS = 32
# Bit 31 is the sign of an int32: words are made as unsigned ones, in the byte order that packbits writes.
_WORD = np.dtype("<u4")


def pack_trees(trees: Sequence[TokenTree], max_draft_len: int) -> Tensors:
    """Return the four inputs of one step, all int32, for B trees of T = 1 + nodes tokens each, the root being node 0.

    max_draft_len: as the engine was built.
    Returns:
        spec_decoding_generation_lengths: (B,), T of each tree.
        spec_decoding_position_offsets: (B, largest T), the depth of each node; 0 behind the last one (inferred).
        spec_decoding_packed_mask: (sum of T, words), the rows of all trees one below the other, without padding.
            Invariant: bit j of word w in row i is set exactly when node i sees node 32 w + j of its own tree; every
            node sees itself.
        spec_decoding_use: (1,), 1, or 0 when no tree has a draft; the one input that stays in host memory.
    Raises EngineError: no trees, or one larger than the engine takes.
    """
    if not trees:
        raise EngineError("a step needs at least one tree, got none")
    lengths = np.array([tree.num_nodes + 1 for tree in trees], np.int32)  # (B,)
    longest, words = int(lengths.max()), num_words(max_draft_len)
    if longest > max_draft_len + 1:
        raise EngineError(
            f"a tree has {longest - 1} nodes, the engine takes at most {max_draft_len} (its max_draft_len)"
        )
    offsets = np.zeros((len(trees), longest), np.int32)
    for row, tree in zip(offsets, trees, strict=True):
        row[: tree.num_nodes + 1] = tree.depths
    return {
        GENERATION_LENGTHS: lengths,
        POSITION_OFFSETS: offsets,
        PACKED_MASK: np.concatenate([pack_mask(tree.mask, words) for tree in trees]),
        USE: np.array([longest > 1], np.int32),
    }


def num_words(max_draft_len: int) -> int:
    """Return the words of a row: ceil((max_draft_len + 1) / 32)."""
    return -(-(max_draft_len + 1) // _WORD_BITS)


def pack_mask(mask: BoolArray, words: int) -> npt.NDArray[np.int32]:
    """Pack a tree mask, (T, T) bool with T <= 32 words, into (T, words) int32."""
    padded = np.zeros((len(mask), words * _WORD_BITS), np.bool_)
    padded[:, : len(mask)] = mask
    return np.packbits(padded, axis=1, bitorder="little").view(_WORD).astype(np.uint32).view(np.int32)
