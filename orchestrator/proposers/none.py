"""No draft: plain autoregressive decoding."""

from __future__ import annotations

from orchestrator.tree import TokenTree
from orchestrator.types import Acceptance, Budget, Context, Proposal, Sampling, Want


class NoProposer:
    """Always proposes the bare root."""

    name = "none"
    want = Want()

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return no draft."""
        return Proposal.none()

    def observe(self, tree: TokenTree, acceptance: Acceptance) -> None:
        """Learn nothing."""

    def close(self) -> None:
        """Hold nothing."""
