"""Drafts that a grammar forbids are not worth a forward pass."""

from __future__ import annotations

import logging

from orchestrator.core.context import Context
from orchestrator.core.proposal import Budget, Proposal, Proposer
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, StepOptions
from orchestrator.sampling.grammar_matcher import Matcher
from orchestrator.sampling.sampled_drafts import well_drawn

log = logging.getLogger(__name__)


class Guarded:
    """A proposer whose failures and broken trees become bare roots; after the first one it is asked no more.

    vocab_size: of the target; a tree with another id is broken, too.
    """

    def __init__(self, proposer: Proposer, vocab_size: int) -> None:
        self.name = proposer.name
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._failed = False

    @property
    def options(self) -> StepOptions:
        """What the proposer wants; nothing once it has failed."""
        return StepOptions() if self._failed else self._proposer.options

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return the proposal within the budget, or a bare root when it breaks a law."""
        if self._failed:
            return Proposal.none()
        try:
            proposal = self._proposer.propose(context, sampling, budget).cut(budget)
            sound = self._well_drawn(proposal)
            TokenTree.checked(sound.tree.tokens, sound.tree.parents, self._vocab_size, budget.max_nodes)
        except Exception:
            self._fail("propose")
            return Proposal.none()
        return sound

    def _well_drawn(self, proposal: Proposal) -> Proposal:
        """Return what comes before the first bad q of each path: dropping that, too, would bend the law of the text."""
        sound = proposal.only(well_drawn(proposal.tree, proposal.q, self._vocab_size))
        if sound is not proposal:
            num_bad = proposal.tree.num_nodes - sound.tree.num_nodes
            log.error("%s drew %d nodes from a bad q: the request goes on undrafted", self.name, num_bad)
            self._failed = True
        return sound

    def observe(self, tree: TokenTree, acceptance: Acceptance) -> None:
        """Let the proposer learn."""
        if self._failed:
            return
        try:
            self._proposer.observe(tree, acceptance)
        except Exception:
            self._fail("observe")

    def close(self) -> None:
        """Free what the proposer holds."""
        self._proposer.close()

    def _fail(self, what: str) -> None:
        log.exception("%s failed in %s: the request goes on undrafted", self.name, what)
        self._failed = True


class Pruned(Proposer):
    """A proposer without the nodes that the request's grammar forbids.

    Invariant: the text is the same, since the target would accept none of them. Left alone are drawn drafts under a rule that
    asks what they were drawn from, where leaving one out by its value would bend the law, and those of a proposer that
    learns from the picks at all its nodes.
    """

    def __init__(self, proposer: Proposer, matcher: Matcher) -> None:
        self.name = proposer.name
        self._proposer = proposer
        self._matcher = matcher

    @property
    def options(self) -> StepOptions:
        """What the other one wants."""
        return self._proposer.options

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return what may come of the other one's proposal."""
        proposal = self._proposer.propose(context, sampling, budget)
        if self.options.target_tokens or not proposal.tree.num_nodes or (proposal.q and sampling.rule.uses_q):
            return proposal
        self._matcher.follow(context.output)
        return proposal.only(self._matcher.kept(proposal.tree))

    def observe(self, tree: TokenTree, acceptance: Acceptance) -> None:
        """Let the other one learn."""
        self._proposer.observe(tree, acceptance)

    def close(self) -> None:
        """Free what the other one holds."""
        self._proposer.close()
