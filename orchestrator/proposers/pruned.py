"""Drafts that a grammar forbids are not worth a forward pass."""

from __future__ import annotations

from orchestrator.context import Context
from orchestrator.matcher import Matcher
from orchestrator.proposal import Budget, Proposal, Proposer
from orchestrator.sampling_params import Sampling
from orchestrator.tree import TokenTree
from orchestrator.types import Acceptance, Want


class Pruned(Proposer):
    """A proposer without the nodes that the request's grammar forbids.

    Law: the text is the same, since the target would accept none of them. Left alone are drawn drafts under a rule that
    asks what they were drawn from, where leaving one out by its value would bend the law, and those of a proposer that
    learns from the picks at all its nodes.
    """

    def __init__(self, proposer: Proposer, matcher: Matcher) -> None:
        self.name = proposer.name
        self._proposer = proposer
        self._matcher = matcher

    @property
    def want(self) -> Want:
        """What the other one wants."""
        return self._proposer.want

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return what may come of the other one's proposal."""
        proposal = self._proposer.propose(context, sampling, budget)
        if self.want.picks or not proposal.tree.num_nodes or (proposal.q and sampling.rule.uses_q):
            return proposal
        self._matcher.follow(context.output)
        return proposal.only(self._matcher.kept(proposal.tree))

    def observe(self, tree: TokenTree, acceptance: Acceptance) -> None:
        """Let the other one learn."""
        self._proposer.observe(tree, acceptance)

    def close(self) -> None:
        """Free what the other one holds."""
        self._proposer.close()
