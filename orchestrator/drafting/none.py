"""Plain autoregressive decoding, as a method."""

from __future__ import annotations

from orchestrator.core.context import Context
from orchestrator.core.proposal import Budget, Proposal, Proposer
from orchestrator.core.sampling_params import Sampling


class NoProposer(Proposer):
    """Always proposes the bare root."""

    name = "none"

    def __init__(self, *_: object) -> None:
        """Accept the parameters and dependencies of every proposer, and ignore them."""

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return no draft."""
        return Proposal.plain()
