"""Drafts are hints: what a proposer does wrong costs the request its drafts, never its text."""

from __future__ import annotations

import logging

from orchestrator.context import Context
from orchestrator.drawn import well_drawn
from orchestrator.proposal import Budget, Proposal, Proposer
from orchestrator.sampling_params import Sampling
from orchestrator.tree import TokenTree
from orchestrator.types import Acceptance, Want

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
    def want(self) -> Want:
        """What the proposer wants; nothing once it has failed."""
        return Want() if self._failed else self._proposer.want

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
