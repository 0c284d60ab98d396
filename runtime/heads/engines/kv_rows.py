"""Entries of an EAGLE head in its cache: which stand where, and what each of them sees.

A token j ≥ 1 of the context has the entry j − 1, which stands in slot j of its sequence: so a block of slots is named
by the very tokens that its entries are made of. Slot 0 has no entry. Entries of drafted nodes stand behind the
context's and are overwritten by the next call's, which come from true features.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from torch import Tensor

from runtime.heads.engines.base import HeadCall
from runtime.heads.engines.growth import Growth
from runtime.kv.sequences import CachedSequence


@dataclass(eq=False)
class KVRows:
    """One job's entries in a pass, as `Pass` reads them: tokens, where they stand, what they see.

    index: slot of each in the sequence. place: position of each. seen: (n, num_slots) bool.
    """

    sequence: CachedSequence
    tokens: list[int]
    index: list[int]
    place: list[int]
    seen: np.ndarray

    @property
    def num_context(self) -> int:
        """Entries in the pass."""
        return len(self.tokens)

    @property
    def num_tokens(self) -> int:
        """Entries in the pass."""
        return len(self.tokens)

    @property
    def num_slots(self) -> int:
        """Slots that they may see."""
        return int(self.seen.shape[1])

    def token_ids(self) -> list[int]:
        """Token of each entry."""
        return self.tokens

    def positions(self) -> list[int]:
        """Position of each entry."""
        return self.place

    def slots(self) -> list[int]:
        """Cache slot of each entry."""
        return [self.sequence.slot(i) for i in self.index]

    def visible(self, window: int | None) -> np.ndarray:
        """Return what each entry sees; there is no sliding window."""
        return self.seen


@dataclass(eq=False)
class Draft:
    """A job's tree in the making. slot, state: by candidate, where its entry stands, and what came out of it."""

    job: HeadCall
    growth: Growth
    slot: dict[int, int] = field(default_factory=dict)
    state: dict[int, Tensor] = field(default_factory=dict)

    @cached_property
    def seen_context(self) -> np.ndarray:
        """Slots of the context that hold an entry, (prefix_len,) bool."""
        seen, hole = np.ones(self.job.delta.prefix_len, np.bool_), self.job.opened.missing_rows
        seen[0] = seen[hole.start : hole.stop] = False
        return seen


def context_entries(draft: Draft) -> KVRows:
    """Return the entries that the committed context lacks."""
    sequence, last = draft.job.opened, draft.job.delta.prefix_len
    first = max(sequence.num_computed, 1)
    seen = np.tri(last - first, last, first, dtype=np.bool_) & draft.seen_context
    return KVRows(sequence, sequence.ids[first:last], [*range(first, last)], [*range(first - 1, last - 1)], seen)


def node_entries(draft: Draft) -> KVRows:
    """Return the entries of the frontier's nodes, and give them their slots."""
    growth, job = draft.growth, draft.job
    prefix_len, nodes = job.delta.prefix_len, growth.frontier
    for node in nodes:
        draft.slot[node] = prefix_len + len(draft.slot) - 1
    seen = np.zeros((len(nodes), prefix_len + len(draft.slot) - 1), np.bool_)
    seen[:, :prefix_len] = draft.seen_context
    for row, node in enumerate(nodes):
        seen[row, [draft.slot[step] for step in growth.path(node)]] = True
    index, tokens = [draft.slot[node] for node in nodes], [growth.token(node) for node in nodes]
    return KVRows(job.opened, tokens, index, [prefix_len - 2 + growth.depth] * len(nodes), seen)
