"""The drafts of head engines while they grow: their calls, their time, and the states of their candidates."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from orchestrator.core.context import Context
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.drafter import DraftRequest
from runtime.engine.calls import DraftedTree, EngineCall

#: Fraction of a call's time that is reserved for sending its answer back.
REPLY_MARGIN = 0.1
#: Fraction of a call's time that one pass may take, so that calls that arrive meanwhile have time left.
PASS_SHARE = 0.5

HeadCall = EngineCall[DraftRequest]


def call_after(request: DraftRequest, context: Context) -> HeadCall:
    """Return an earlier request as a call after a longer context, without hidden states."""
    first = request.delta
    delta = delta_of(context, len(context) - 1, first.sequence_id, first.cache_salt)
    head = replace(request.head, features=None)
    return HeadCall(
        replace(request, delta=delta, head=head), time.monotonic() + request.deadline_ms / 1000, lambda answer: None
    )


class TimeBudget:
    """The time that one pass may take, counted from the creation of this object."""

    def __init__(self) -> None:
        self._began_s = self._level_began_s = time.monotonic()
        self._longest_s = 0.0

    def begin_levels(self) -> None:
        """Note that the contexts have been read; the time that this took does not count as a level."""
        self._level_began_s = time.monotonic()

    def note_level(self) -> None:
        """Note that the trees have grown by a level; the next one is assumed to take as long as the slowest so far."""
        now_s = time.monotonic()
        self._longest_s = max(self._longest_s, now_s - self._level_began_s)
        self._level_began_s = now_s

    def allows(self, call: HeadCall) -> bool:
        """Return whether another level of the call's tree would be ready in time."""
        return self._level_began_s + self._longest_s <= self._began_s + self.limit_s(call)

    def limit_s(self, call: HeadCall) -> float:
        """Return how many seconds after the creation of this object the call's tree must be ready."""
        limit_s = call.deadline_s - call.arrived_s
        return min(call.deadline_s - REPLY_MARGIN * limit_s - self._began_s, PASS_SHARE * limit_s)


@dataclass(eq=False)
class DraftInProgress(DraftedTree):
    """A head's call and its growing tree.

    states: the head's state after each candidate that it has read. slots: the cache slot of each such candidate, for a
    head with a KV cache.
    """

    call: HeadCall = field(kw_only=True)
    states: dict[int, Tensor] = field(default_factory=dict, kw_only=True)
    slots: dict[int, int] = field(default_factory=dict, kw_only=True)


def has_newest_features(call: HeadCall) -> bool:
    """Return whether the request holds the features of position prefix_len − 2, from which the root was sampled."""
    head = call.request.head
    if head.features is None or not len(head.features):
        return False
    return head.features_start + len(head.features) == call.delta.prefix_len - 1


def frontier_states(drafts: list[DraftInProgress]) -> Tensor:
    """Return the states of all frontiers' candidates, draft by draft, (n, …)."""
    return torch.stack([draft.states[node] for draft in drafts for node in draft.tree.frontier])


def parent_states(drafts: list[DraftInProgress]) -> Tensor:
    """Return the states of the parents of all frontiers' candidates, draft by draft, (n, …)."""
    return torch.stack([draft.states[draft.tree.parents[node]] for draft in drafts for node in draft.tree.frontier])
