"""No draft: plain autoregressive decoding."""

from __future__ import annotations

from orchestrator.core.context import Context
from orchestrator.core.proposal import Budget, Proposal, Proposer
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.types import StepOptions


class NoProposer(Proposer):
    """Always proposes the bare root."""

    name = "none"
    options = StepOptions()

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return no draft."""
        return Proposal.none()
