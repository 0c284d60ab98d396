"""Groups of segments that attend in one call: which ones, what each row sees, and where their keys and values are.

A group of B segments is padded to n rows and S slots. Rows that pad repeat the segment's last one, and slots that pad
repeat its last slot, which no row sees: so nothing of another segment, and nothing that was never written, is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from runtime.engine.kv.sequences import CachedSequence

#: A segment of up to this many tokens is a decoding step, which is not split; a tree of up to this many nodes is small.
STEP_TOKENS = 32
#: A segment of more tokens is a part of a prompt or a large tree.
MAX_STEP_ROWS = 2 * STEP_TOKENS
#: Most slots of a group, padding included, unless a single segment has more: it bounds the memory of gathered copies.
MAX_GROUP_SLOTS = 1 << 16
#: Attention on a GPU copies a bias whose rows do not begin at a multiple of this many numbers.
BIAS_ALIGNMENT = 8


class Visible(NamedTuple):
    """What each of a segment's n rows sees: the slots before its reach, and some of those from `start` on.

    reach: (n,) int64. start: int. seen: (n, m) bool, whether a row sees the slots start … start + m − 1.
    """

    reach: np.ndarray
    start: int
    seen: np.ndarray


class PassSegment(Protocol):
    """One sequence's part of the row, as `Pass` and attention read it; its KV rows fill the slots from `first`."""

    sequence: CachedSequence
    first: int

    @property
    def num_tokens(self) -> int:
        """Tokens in the row."""

    @property
    def num_slots(self) -> int:
        """Slots of the sequence that the tokens may see."""

    @property
    def num_outputs(self) -> int:
        """Tokens, the last ones, whose outputs are read."""

    def token_ids(self) -> list[int]:
        """Return the id of each token."""

    def positions(self) -> list[int]:
        """Return the absolute position of each token."""

    def visible(self) -> Visible:
        """Return which slots each token sees, without regard to sliding windows."""


def grouped(segments: Sequence[PassSegment]) -> list[list[int]]:
    """Return the indices of the segments that attend together, so that padding at most doubles the work.

    Work is (rows + STEP_TOKENS) · slots: reading a slot costs about as much as computing with that many rows. Long
    parts of prompts are never grouped with steps.
    """
    sizes = [(segment.num_tokens > MAX_STEP_ROWS, segment.num_slots, segment.num_tokens) for segment in segments]
    groups: list[list[int]] = []
    work = most_rows = 0
    for index in sorted(range(len(sizes)), key=sizes.__getitem__):
        is_long, slots, rows = sizes[index]
        own_work = (rows + STEP_TOKENS) * slots
        work, most_rows = work + own_work, max(most_rows, rows)
        padded_slots = (1 + len(groups[-1])) * slots if groups else math.inf
        is_too_large = padded_slots * (most_rows + STEP_TOKENS) > 2 * work or padded_slots > MAX_GROUP_SLOTS
        if is_too_large or is_long != sizes[groups[-1][0]][0]:
            groups.append([])
            work, most_rows = own_work, rows
        groups[-1].append(index)
    return [sorted(group) for group in groups]


class GroupArrays(NamedTuple):
    """What a group needs on the device; numpy arrays on the host, tensors there.

    rows, positions: (B, n), each row's index in the pass and its position. first, last: (B, 1), the slot of the
    segment's first row and its last slot. blocks: (B, k), its blocks. reach, start, seen: as in `Visible`, (B, n),
    (B, 1) and (B, n, m + 2), with a column of False on each side for the slots outside. All but `seen` are int64.
    """

    rows: Any
    positions: Any
    first: Any
    last: Any
    blocks: Any
    reach: Any
    start: Any
    seen: Any


class Group:
    """B segments that attend in one call. starts: the index in the pass of each segment's first token.

    num_rows: n. num_slots: S. span: the slots of a single segment whose blocks are contiguous, which is read without a
    copy. is_staged: the pass sets `device`; otherwise it is a single segment on a CPU.
    """

    def __init__(self, segments: Sequence[PassSegment], starts: Sequence[int], is_staged: bool) -> None:
        self._segments, self.starts, self._is_staged = segments, starts, is_staged
        self.sizes = [segment.num_tokens for segment in segments]
        self.size, self.num_rows = len(segments), max(self.sizes)
        self.num_slots = max(segment.num_slots for segment in segments)
        sequence = segments[0].sequence
        start = sequence.slot(0)
        self.span = slice(start, start + self.num_slots) if len(segments) == 1 and sequence.is_contiguous() else None
        self.block_tokens = sequence.block_tokens
        self._biases: dict[tuple[int | None, int], Tensor | None] = {}

    @cached_property
    def real(self) -> np.ndarray:
        """Return which rows belong to a token, (B, n) bool; the others pad."""
        return np.arange(self.num_rows) < _column(self.sizes)

    @cached_property
    def host(self) -> GroupArrays:
        """What the group needs on the device, in the host's memory."""
        segments, visible = self._segments, self._visible
        places = np.minimum(np.arange(self.num_rows), _column(self.sizes) - 1)
        return GroupArrays(
            _column(self.starts) + places,
            np.stack([np.array(each.positions())[own] for each, own in zip(segments, places, strict=True)]),
            _column([segment.first for segment in segments]),
            _column([segment.num_slots - 1 for segment in segments]),
            _side_by_side([np.array(segment.sequence.blocks) for segment in segments]),
            np.stack([each.reach[own] for each, own in zip(visible, places, strict=True)]),
            _column([each.start for each in visible]),
            _with_margins([each.seen[own] for each, own in zip(visible, places, strict=True)]),
        )

    @cached_property
    def device(self) -> GroupArrays:
        """The same on the device: set by the pass, which copies all groups at once, if the group is staged."""
        return GroupArrays(*map(torch.from_numpy, self.host))

    @cached_property
    def _visible(self) -> list[Visible]:
        return [segment.visible() for segment in self._segments]

    def keys_and_values(self, store: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, (B, kv_heads, S, head_dim) each; store: (2, kv_heads, slots, head_dim)."""
        if self.span is not None:
            own = store.narrow(2, self.span.start, self.num_slots).unsqueeze(1)
        else:
            own = store[:, :, self._slots].unflatten(2, (self.size, self.num_slots)).transpose(1, 2)
        keys, values = own.unbind()
        return keys, values

    @cached_property
    def _slots(self) -> Tensor:
        """The cache slots of every segment, (B · S,) int64."""
        arrays, size = self.device, self.block_tokens
        index = torch.minimum(self._indices(self.num_slots), arrays.last)
        return (arrays.blocks.gather(1, index // size) * size + index % size).flatten()

    def bias(self, window: int | None, heads_per_key: int, dtype: torch.dtype) -> Tensor | None:
        """Return the bias for the scores, (B, 1, heads_per_key · n, S): 0 or −inf; None if every row sees every slot.

        window: the layer's sliding window; a token sees only positions less than `window` before its own.
        """
        key = window, heads_per_key
        if key not in self._biases:
            self._biases[key] = self._bias(window, heads_per_key, dtype)
        return self._biases[key]

    @property
    def windows(self) -> set[int | None]:
        """The sliding windows that layers have used; None stands for full attention."""
        return {window for window, _ in self._biases}

    def _bias(self, window: int | None, heads_per_key: int, dtype: torch.dtype) -> Tensor | None:
        limit = None if window is None or window > int(self.host.positions.max()) else window
        if limit is None and all((each.reach >= self.num_slots).all() for each in self._visible):
            return None
        width = -(-self.num_slots // BIAS_ALIGNMENT) * BIAS_ALIGNMENT
        seen = self._seen(self._indices(width)) if self._is_staged else torch.from_numpy(self._seen_alone(width))
        if limit is not None:
            seen &= self._distances(self._indices(width)) < limit
        bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
        return bias.repeat(1, heads_per_key, 1)[:, None, :, : self.num_slots]

    def _seen(self, slots: Tensor) -> Tensor:
        """Return whether each row sees each slot, (B, n, S) bool; slots: (S,)."""
        arrays = self.device
        seen: Tensor = slots < arrays.reach[..., None]
        margins = arrays.seen.shape[-1]
        if margins > 2:
            columns = (slots - arrays.start + 1).clamp_(0, margins - 1)
            seen |= arrays.seen.gather(2, columns[:, None].expand(seen.shape))
        return seen

    def _seen_alone(self, width: int) -> np.ndarray:
        """Return the same of a single segment, (1, n, width), without the arrays that a GPU needs."""
        (visible,) = self._visible
        seen = np.arange(width) < visible.reach[None, :, None]
        seen[0, :, visible.start : visible.start + visible.seen.shape[1]] |= visible.seen
        return seen

    def _distances(self, slots: Tensor) -> Tensor:
        """Return by how much the position of each slot is before that of each row, (B, n, S); slots: (S,)."""
        positions: Tensor = self.device.positions
        own = positions.gather(1, (slots - self.device.first).clamp_(0, self.num_rows - 1))
        return positions[..., None] - torch.where(slots < self.device.first, slots, own)[:, None]

    def _indices(self, count: int) -> Tensor:
        return torch.arange(count, device=self.device.last.device)


def _column(numbers: Sequence[int]) -> np.ndarray:
    return np.array(numbers, np.int64)[:, None]


def _side_by_side(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Return rows of unequal length as one array; shorter ones end with zeros."""
    table = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for own, row in zip(table, rows, strict=True):
        own[: len(row)] = row
    return table


def _with_margins(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return (n, m) arrays of unequal m as one, (B, n, m + 2), with False on each side and where a part is narrower."""
    table = np.zeros((len(parts), len(parts[0]), max(part.shape[1] for part in parts) + 2), np.bool_)
    for own, part in zip(table, parts, strict=True):
        own[:, 1 : 1 + part.shape[1]] = part
    return table
