"""The layout of a forward pass: the tokens of many requests in one row, their positions, slots and attention masks.

A segment is one request's part of the row: the context tokens that are not computed yet (the root last), then the nodes
of its tree. In the cache, a sequence's slots 0 … prefix_len − 1 hold the context; the slots after them hold the nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from orchestrator.core.tree import TokenTree
from runtime.engine.kv.groups import Group, GroupArrays, PassSegment, Visible, grouped
from runtime.engine.kv.sequences import CachedSequence
from runtime.engine.staging import stage

#: Most nodes of larger trees in one pass, unless a single tree has more: it bounds how long steps without them wait.
MAX_TREE_NODES = 256
#: Most rows in one pass, as in native code (kMaxPassRows).
MAX_PASS_ROWS = 4096


@dataclass(eq=False)
class Segment:
    """One request's part of a pass over a language model.

    first: index of the first context token to compute. last: one past the last context token.
    tree: drafts below token last − 1, the root; bare while a long context is computed in parts.
    """

    sequence: CachedSequence
    first: int
    last: int
    tree: TokenTree = field(default_factory=TokenTree.bare)

    @property
    def num_context(self) -> int:
        """Context tokens in the row."""
        return self.last - self.first

    @property
    def num_tokens(self) -> int:
        """Context tokens and nodes in the row."""
        return self.num_context + self.tree.num_nodes

    @property
    def num_slots(self) -> int:
        """Slots of the sequence that the tokens may see."""
        return self.last + self.tree.num_nodes

    def token_ids(self) -> list[int]:
        """Return the id of each token."""
        return self.sequence.ids[self.first : self.last] + self.tree.tokens.tolist()

    def positions(self) -> list[int]:
        """Return the absolute position of each token; that of a node is the root's plus the node's depth."""
        nodes = self.tree.depths[1:] + (self.last - 1)
        return list(range(self.first, self.last)) + nodes.tolist()

    @property
    def num_outputs(self) -> int:
        """The root and the nodes; of a part of a long context, which has no root, its last token."""
        return 1 + self.tree.num_nodes

    def visible(self) -> Visible:
        """Return which slots each token sees.

        Invariant: a context token sees the slots up to its own; a node sees the context, its ancestors and itself.
        """
        reach = np.minimum(np.arange(self.first, self.first + self.num_tokens) + 1, self.last)
        ancestors = np.zeros((self.num_tokens, self.tree.num_nodes), np.bool_)
        ancestors[self.num_context :] = self.tree.mask[1:, 1:]
        return Visible(reach, self.last, ancestors)


class Layout(NamedTuple):
    """A pass on the device. is_in_order: the groups hold the row's tokens in their order, without padding.

    ids, positions, slots: (N,) int64, of each token of the row; its keys and values are written to the slot. outputs:
    (rows,) int64, the indices in the row of the tokens whose outputs are read. places: (N,) int64, where the groups'
    padded tokens, one group after another, hold each token; empty if they are in order.
    """

    groups: list[Group]
    is_in_order: bool
    ids: Tensor
    positions: Tensor
    slots: Tensor
    outputs: Tensor
    places: Tensor


AnySegment = TypeVar("AnySegment", bound=PassSegment)


class Pass(Generic[AnySegment]):
    """A batch of segments as tensors, which are made on first use: the native forward pass reads only the segments."""

    def __init__(self, segments: Sequence[AnySegment], device: torch.device, dtype: torch.dtype) -> None:
        self.segments = segments
        self.dtype = dtype
        self.device = device

    @property
    def ids(self) -> Tensor:
        """Ids of the row's tokens, (1, N) int64."""
        return self._layout.ids[None]

    @property
    def positions(self) -> Tensor:
        """Positions of the row's tokens, (1, N) int64."""
        return self._layout.positions[None]

    @property
    def slots(self) -> Tensor:
        """Slots that the tokens' keys and values are written to, (N,) int64."""
        return self._layout.slots

    @property
    def outputs(self) -> Tensor:
        """Indices in the row of the tokens whose outputs are read, (rows,) int64."""
        return self._layout.outputs

    @property
    def groups(self) -> list[Group]:
        """The segments that attend in one call."""
        return self._layout.groups

    def by_group(self, row: Tensor) -> list[Tensor]:
        """Return the tokens of each group, (B, H, n, d), padded; row: (1, H, N, d)."""
        if not self._layout.is_in_order:
            return [row[0, :, group.device.rows].transpose(0, 1) for group in self.groups]
        parts = row.split([group.size * group.num_rows for group in self.groups], dim=2)
        return [
            part if group.size == 1 else part[0].unflatten(1, (group.size, -1)).transpose(0, 1)
            for part, group in zip(parts, self.groups, strict=True)
        ]

    def in_row(self, parts: list[Tensor]) -> Tensor:
        """Return the row, (1, N, H, d), of the groups' tokens, (B, H, n, d) each; `by_group` is its reverse."""
        if self._layout.is_in_order and all(group.size == 1 for group in self.groups):
            return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)).transpose(1, 2)
        flat = [part.transpose(1, 2).flatten(0, 1) for part in parts]
        joined = flat[0] if len(flat) == 1 else torch.cat(flat)
        return (joined if self._layout.is_in_order else joined[self._layout.places])[None]

    @property
    def windows(self) -> set[int | None]:
        """The sliding windows that layers have used; None stands for full attention."""
        return {window for group in self.groups for window in group.windows}

    @cached_property
    def _layout(self) -> Layout:
        """The pass on the device, where all of it goes in one copy."""
        segments = self.segments
        ends = np.cumsum([segment.num_tokens for segment in segments]).tolist()
        is_joined = joins(self.device)
        members = grouped(segments) if is_joined else [[index] for index in range(len(segments))]
        groups = [
            Group([segments[i] for i in own], [ends[i] - segments[i].num_tokens for i in own], is_joined)
            for own in members
        ]
        is_in_order = _are_in_order(groups)
        columns = [
            [token for s in segments for token in s.token_ids()],
            [position for s in segments for position in s.positions()],
            [s.sequence.slot(s.first + i) for s in segments for i in range(s.num_tokens)],
            [i for s, end in zip(segments, ends, strict=True) for i in range(end - s.num_outputs, end)],
        ]
        arrays = [np.array(column, np.int64) for column in [*columns, [] if is_in_order else _places(groups)]]
        copied = groups if is_joined else []
        tensors = iter(stage([*arrays, *(array for group in copied for array in group.host)], self.device))
        staged = list(islice(tensors, len(arrays)))
        for group in copied:
            group.device = GroupArrays(*islice(tensors, len(group.host)))
        return Layout(groups, is_in_order, *staged)


def joins(device: torch.device) -> bool:
    """Return whether segments attend in groups.

    On a GPU each launch costs; on a CPU the copies of keys and values cost more, and each segment reads its own in
    place where its blocks are contiguous.
    """
    return device.type != "cpu"


def _are_in_order(groups: Sequence[Group]) -> bool:
    """Return whether the groups hold the row's tokens in their order, without padding."""
    starts = [start for group in groups for start in group.starts]
    return starts == sorted(starts) and all(min(group.sizes) == group.num_rows for group in groups)


def _places(groups: Sequence[Group]) -> np.ndarray:
    """Return where the groups' padded tokens, one group after another, hold each token of the row, (N,)."""
    rows = np.concatenate([group.host.rows.ravel() for group in groups])
    real = np.concatenate([group.real.ravel() for group in groups])
    return np.flatnonzero(real)[rows[real].argsort()]
