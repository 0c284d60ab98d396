"""A neural drafter in another process, asked through a bounded, breakable line; its answer is a hint."""

from __future__ import annotations

from typing import Protocol

from orchestrator.tree import TokenTree
from orchestrator.types import Acceptance, Budget, Context, Proposal, Sampling, Want


class DraftLine(Protocol):
    """One request's line to a drafter; never raises and never blocks beyond its limit."""

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> TokenTree:
        """Return the drafter's tree, or a bare root when none came in time."""

    def close(self) -> None:
        """Tell the drafter that the request has ended."""


class DraftModel:
    """A draft language model that proposes a chain in one call."""

    name = "draft_model"
    want = Want()

    def __init__(self, line: DraftLine, draft_len: int) -> None:
        self._line = line
        self._draft_len = draft_len

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return the draft model's chain of at most draft_len tokens."""
        length = budget.clipped(self._draft_len)
        if not length:
            return Proposal.none(self.name)
        return Proposal(self._line.propose(context, sampling, Budget(length, length)), self.name)

    def observe(self, tree: TokenTree, acceptance: Acceptance) -> None:
        """Learn nothing: the next call's context tells the drafter what was accepted."""

    def close(self) -> None:
        """End the drafter's sequence."""
        self._line.close()
