"""The input tensors of one run of a compiled engine, by name: contexts, or steps with their trees; numpy only.

Contexts and steps are never mixed in one run.
Source: the documentation of the engine's inputs (tests/data/trtllm/engine_inputs.json).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from orchestrator.core.tree import TokenTree
from orchestrator.wire.tensors import Tensors
from runtime.kv.batch import Segment
from runtime.trtllm.trees.geometry import Geometry
from runtime.trtllm.trees.packed_mask import pack_trees

CONTEXT, STEP = 0, 1


class Row(NamedTuple):
    """One sequence's share of a run. past: tokens before it, whose KV rows are in `blocks`. tree: of a step."""

    ids: list[int]
    past: int
    blocks: list[int]
    tree: TokenTree


def context_row(segment: Segment) -> Row:
    """Return the tokens that a segment computes before its root; there may be none."""
    sequence = segment.sequence
    return Row(sequence.ids[segment.first : segment.last - 1], segment.first, sequence.blocks, TokenTree.bare())


def step_row(segment: Segment) -> Row:
    """Return a segment's root and nodes."""
    sequence, root = segment.sequence, segment.last - 1
    return Row([sequence.ids[root], *segment.tree.tokens.tolist()], root, sequence.blocks, segment.tree)


def groups(rows: Sequence[Row], geometry: Geometry) -> Iterator[list[Row]]:
    """Yield the rows in groups of at most as many sequences and tokens as the engine takes in one run."""
    group: list[Row] = []
    for row in rows:
        num_tokens = sum(len(each.ids) for each in group) + len(row.ids)
        if group and (len(group) == geometry.max_batch_size or num_tokens > geometry.max_num_tokens):
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def context_inputs(rows: Sequence[Row], geometry: Geometry, pool: int) -> Tensors:
    """Return the inputs of a run over parts of contexts; its logits, one row a sequence, are not used.

    pool: address of the KV blocks. The past lengths include the run itself, as in the library's own runtime (C++,
    RuntimeBuffers).
    """
    lengths = np.array([len(row.ids) for row in rows])
    past = np.array([row.past for row in rows]) + lengths
    positions = [row.past + i for row in rows for i in range(len(row.ids))]
    return _inputs(rows, geometry, pool, CONTEXT, positions, np.cumsum(lengths), lengths, past)


def step_inputs(rows: Sequence[Row], geometry: Geometry, pool: int) -> Tensors:
    """Return the inputs of a run over roots and their trees, which has logits for each of them, (sum of T, V).

    The position of a sequence is its root's; the engine adds each node's depth. Inferred: the context of a step is all
    tokens before it.
    """
    past, num_rows = [row.past for row in rows], sum(len(row.ids) for row in rows)
    return _inputs(rows, geometry, pool, STEP, past, range(1, num_rows + 1), past, past)


_Lengths = Sequence[int] | npt.NDArray[np.int_]


def _inputs(
    rows: Sequence[Row],
    geometry: Geometry,
    pool: int,
    kind: int,
    positions: _Lengths,
    last_tokens: _Lengths,
    context_lengths: _Lengths,
    past_lengths: _Lengths,
) -> Tensors:
    layers, offsets = geometry.shape.num_layers, block_offsets(rows, geometry)
    knobs = np.full(16, -1, np.int64)
    knobs[0] = 1  # several blocks of threads a sequence
    return {
        "input_ids": np.array([token for row in rows for token in row.ids], np.int32),
        "position_ids": np.array(positions, np.int32),
        "last_token_ids": np.array(last_tokens, np.int32),
        "sequence_length": np.array([row.past + len(row.ids) for row in rows], np.int32),
        "context_lengths": np.array(context_lengths, np.int32),
        "cache_indirection": np.zeros((len(rows), 1, geometry.max_seq_len), np.int32),
        "kv_cache_block_offsets": offsets,
        "host_context_lengths": np.array(context_lengths, np.int32),
        "host_past_key_value_lengths": np.array(past_lengths, np.int32),
        "host_request_types": np.full(len(rows), kind, np.int32),
        "host_kv_cache_block_offsets": offsets,
        "host_kv_cache_pool_pointers": np.array([[pool, 0]], np.int64),
        "host_kv_cache_pool_mapping": np.stack([np.zeros(layers), np.arange(layers)], axis=1).astype(np.int32),
        "host_max_attention_window_sizes": np.full(layers, geometry.max_seq_len, np.int32),
        "host_sink_token_length": np.zeros(1, np.int32),
        "host_runtime_perf_knobs": knobs,
        "host_context_progress": np.zeros(1, np.int64),
        **pack_trees([row.tree for row in rows], geometry.max_draft_len),  # bare trees in a context: not used there
    }


def block_offsets(rows: Sequence[Row], geometry: Geometry) -> npt.NDArray[np.int32]:
    """Return the offsets of each sequence's blocks, (pools, B, 2, max_blocks) int32; their invariant: `PoolCache`."""
    offsets = np.zeros((1, len(rows), 2, geometry.max_blocks), np.int32)
    for index, row in enumerate(rows):
        keys = 2 * geometry.shape.num_layers * np.array(row.blocks[: geometry.max_blocks])
        offsets[0, index, :, : len(keys)] = keys, keys + 1
    return offsets
