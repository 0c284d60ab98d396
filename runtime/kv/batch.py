"""One forward pass over many requests laid out in one row: which token stands where, and what it may see.

A segment is one request's share of the row: context tokens that are not computed yet (the root last), then the
nodes of its tree. Slots of a segment's sequence are 0 … prefix_len − 1 for the context, then one per node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from orchestrator.core.tree import TokenTree
from runtime.kv.sequences import CachedSequence


@dataclass(eq=False)
class Segment:
    """The part of a pass that belongs to one sequence.

    first: index of the first context token to compute; last: one past the last context token.
    tree: drafts behind token last − 1 (the root); bare while a long context is computed in parts.
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
        """Tokens in the row: context and nodes."""
        return self.num_context + self.tree.num_nodes

    @property
    def num_slots(self) -> int:
        """Slots that the tokens of the row may see."""
        return self.last + self.tree.num_nodes

    def token_ids(self) -> list[int]:
        """Ids of the row."""
        return self.sequence.ids[self.first : self.last] + self.tree.tokens.tolist()

    def positions(self) -> list[int]:
        """Absolute positions: a node's is the root's plus its depth."""
        nodes = self.tree.depths[1:] + (self.last - 1)
        return list(range(self.first, self.last)) + nodes.tolist()

    def slots(self) -> list[int]:
        """Cache slots in which the row's keys and values are written."""
        return [self.sequence.slot(index) for index in range(self.first, self.num_slots)]

    def visible(self, window: int | None) -> np.ndarray:
        """Return (num_tokens, num_slots) bool: who sees what.

        Invariant: a context token sees the slots up to its own; a node sees the context, its ancestors and itself;
        with a sliding window, only positions less than `window` before its own.
        """
        seen = np.ones((self.num_tokens, self.num_slots), np.bool_)
        seen[: self.num_context] = np.tri(self.num_context, self.num_slots, self.first, dtype=np.bool_)
        seen[self.num_context :, self.last :] = self.tree.mask[1:, 1:]
        if window is not None:
            own = np.array(self.positions())
            slot_positions = np.concatenate([np.arange(self.first), own])
            seen &= own[:, None] - slot_positions[None, :] < window
        return seen


class Share(Protocol):
    """What a pass must know of the part of its row that belongs to one sequence; the methods are as in `Segment`."""

    sequence: CachedSequence

    @property
    def num_context(self) -> int:
        """Tokens in the row that are no drafts."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the row."""

    @property
    def num_slots(self) -> int:
        """Slots that they may see."""

    def token_ids(self) -> list[int]:
        """Ids of the row."""

    def positions(self) -> list[int]:
        """Absolute positions."""

    def slots(self) -> list[int]:
        """Cache slots that are written."""

    def visible(self, window: int | None) -> np.ndarray:
        """Return (num_tokens, num_slots) bool."""


Part = TypeVar("Part", bound=Share)


class Pass(Generic[Part]):
    """A batch of segments as tensors: ids, positions and slots of the row, and each segment's bias."""

    def __init__(self, segments: Sequence[Part], device: torch.device, dtype: torch.dtype) -> None:
        self.segments = segments
        self.dtype = dtype
        self.device = device
        self.ids = self._row([s.token_ids() for s in segments])
        self.positions = self._row([s.positions() for s in segments])
        self.slots = self._row([s.slots() for s in segments])[0]
        self.runs = [s.sequence.is_run() for s in segments]
        self._blocks: dict[int, Tensor] = {}
        self._biases: dict[tuple[int, int | None, int], Tensor | None] = {}

    def _row(self, parts: list[list[int]]) -> Tensor:
        flat = [x for part in parts for x in part]
        return torch.tensor([flat], device=self.device)

    def logit_rows(self) -> Tensor:
        """Indices in the row of every root and node, segment by segment."""
        rows: list[int] = []
        start = 0
        for segment in self.segments:
            rows += range(start + segment.num_context - 1, start + segment.num_tokens)
            start += segment.num_tokens
        return torch.tensor(rows, device=self.device)

    def cached(self, index: int, store: Tensor, block_tokens: int) -> Tensor:
        """Return segment `index`'s slots of `store`, (kv_heads, num_slots, head_dim): in place where they are one run.

        store: (kv_heads, slots, head_dim), one layer's keys or values.
        """
        segment = self.segments[index]
        if self.runs[index]:
            start = segment.sequence.slot(0)
            return store[:, start : start + segment.num_slots]
        if index not in self._blocks:
            self._blocks[index] = torch.tensor(segment.sequence.blocks, device=self.device)
        blocks = store.unflatten(1, (-1, block_tokens))
        return blocks[:, self._blocks[index]].flatten(1, 2)[:, : segment.num_slots]

    def bias(self, index: int, window: int | None, groups: int) -> Tensor | None:
        """Return 0 or −inf to add to the scores of segment `index`, (groups · num_tokens, num_slots).

        None where every token sees every slot.
        """
        key = (index, window, groups)
        if key not in self._biases:
            seen = self.segments[index].visible(window)
            self._biases[key] = None if seen.all() else self._additive(seen, groups)
        return self._biases[key]

    @property
    def windows(self) -> set[int | None]:
        """Sliding windows that layers have asked for, None among them for full attention."""
        return {window for _, window, _ in self._biases}

    def _additive(self, seen: np.ndarray, groups: int) -> Tensor:
        bias = torch.zeros(seen.shape, dtype=self.dtype)
        bias.masked_fill_(torch.from_numpy(~seen), -torch.inf)
        return bias.to(self.device).repeat(groups, 1)
