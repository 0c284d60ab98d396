"""The layout of a forward pass: the tokens of many requests in one row, their positions, slots and attention masks.

A segment is one request's part of the row: the context tokens that are not computed yet (the root last), then the nodes
of its tree. In the cache, a sequence's slots 0 … prefix_len − 1 hold the context; the slots after them hold the nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from orchestrator.core.tree import TokenTree
from runtime.kv.sequences import CachedSequence

#: A segment of up to this many tokens is a decoding step, which is not split; a tree of up to this many nodes is small.
STEP_TOKENS = 32
#: Most nodes of larger trees in one pass, unless a single tree has more: it bounds how long steps without them wait.
MAX_TREE_NODES = 256
#: Most rows in one pass, as in native code (kMaxPassRows).
MAX_PASS_ROWS = 4096


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

    def token_ids(self) -> list[int]:
        """Return the id of each token."""

    def positions(self) -> list[int]:
        """Return the absolute position of each token."""

    def visible(self, window: int | None) -> np.ndarray:
        """Return which slots each token sees, (num_tokens, num_slots) bool; window: the layer's sliding window."""


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

    def visible(self, window: int | None) -> np.ndarray:
        """Return which slots each token sees, (num_tokens, num_slots) bool.

        Invariant: a context token sees the slots up to its own; a node sees the context, its ancestors and itself.
        With a sliding window, a token sees only positions less than `window` before its own.
        """
        seen = np.ones((self.num_tokens, self.num_slots), np.bool_)
        seen[: self.num_context] = np.tri(self.num_context, self.num_slots, self.first, dtype=np.bool_)
        seen[self.num_context :, self.last :] = self.tree.mask[1:, 1:]
        if window is not None:
            own = np.array(self.positions())
            slot_positions = np.concatenate([np.arange(self.first), own])
            seen &= own[:, None] - slot_positions[None, :] < window
        return seen


AnySegment = TypeVar("AnySegment", bound=PassSegment)


class Pass(Generic[AnySegment]):
    """A batch of segments as tensors."""

    def __init__(self, segments: Sequence[AnySegment], device: torch.device, dtype: torch.dtype) -> None:
        self.segments = segments
        self.dtype = dtype
        self.device = device
        self._blocks: dict[int, Tensor] = {}
        self._biases: dict[tuple[int, int | None, int], Tensor | None] = {}

    # Made on first use: the native forward pass reads only the segments.
    @cached_property
    def ids(self) -> Tensor:
        """Ids of the row's tokens, (1, N) int64."""
        return self._row([s.token_ids() for s in self.segments])

    @cached_property
    def positions(self) -> Tensor:
        """Positions of the row's tokens, (1, N) int64."""
        return self._row([s.positions() for s in self.segments])

    @cached_property
    def slots(self) -> Tensor:
        """Slots that the tokens' keys and values are written to, (N,) int64."""
        return self._row([[s.sequence.slot(s.first + i) for i in range(s.num_tokens)] for s in self.segments])[0]

    @cached_property
    def _is_contiguous(self) -> list[bool]:
        return [s.sequence.is_contiguous() for s in self.segments]

    def _row(self, parts: list[list[int]]) -> Tensor:
        return torch.tensor([[x for part in parts for x in part]], device=self.device)

    def cached(self, index: int, store: Tensor, block_tokens: int) -> Tensor:
        """Return the keys or values of segment `index`, (kv_heads, num_slots, head_dim): a view of contiguous blocks.

        They are a copy if the blocks are scattered. store: (kv_heads, slots, head_dim), one layer's keys or values.
        """
        segment = self.segments[index]
        if self._is_contiguous[index]:
            start = segment.sequence.slot(0)
            return store[:, start : start + segment.num_slots]
        if index not in self._blocks:
            self._blocks[index] = torch.tensor(segment.sequence.blocks, device=self.device)
        blocks = store.unflatten(1, (-1, block_tokens))
        return blocks[:, self._blocks[index]].flatten(1, 2)[:, : segment.num_slots]

    def bias(self, index: int, window: int | None, groups: int) -> Tensor | None:
        """Return the bias for the scores of segment `index`, (groups · num_tokens, num_slots): 0 or −inf.

        None when every token sees every slot. groups: query heads per key head.
        """
        key = (index, window, groups)
        if key not in self._biases:
            seen = self.segments[index].visible(window)
            self._biases[key] = None
            if not seen.all():
                bias = torch.zeros(seen.shape, dtype=self.dtype).masked_fill_(torch.from_numpy(~seen), -torch.inf)
                self._biases[key] = bias.to(self.device).repeat(groups, 1)
        return self._biases[key]

    @property
    def windows(self) -> set[int | None]:
        """The sliding windows that layers have used; None stands for full attention."""
        return {window for _, window, _ in self._biases}
