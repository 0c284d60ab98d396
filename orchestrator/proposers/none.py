"""No draft: plain autoregressive decoding."""

from __future__ import annotations

from orchestrator.context import Context
from orchestrator.proposal import Budget, Proposal, Proposer
from orchestrator.sampling_params import Sampling
from orchestrator.types import Want


class NoProposer(Proposer):
    """Always proposes the bare root."""

    name = "none"
    want = Want()

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return no draft."""
        return Proposal.none()
