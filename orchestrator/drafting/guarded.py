"""A wrapper that shields the loop from a proposer's failures, and removes drafts that the grammar forbids."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from orchestrator.core.context import Context
from orchestrator.core.grammar_matcher import Matcher, legal_drafts
from orchestrator.core.proposal import Budget, NativeDrafts, Proposal, Proposer, Step
from orchestrator.core.sampled_drafts import nodes_with_valid_q
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import StepOptions
from orchestrator.drafting.costs import StepCosts

log = logging.getLogger(__name__)


class Guarded(Proposer):
    """A proposer whose failures and invalid trees become bare roots; after the first one it is not called again.

    vocab_size: of the target; a tree with an id outside it is invalid.
    matcher: of the grammar that the output must match; nodes that it forbids are left out.
    limit_s: the time limit of a proposal; a proposer that takes longer has failed, since other requests wait for it.
    costs: learn from all steps.
    """

    def __init__(
        self,
        proposer: Proposer,
        vocab_size: int,
        matcher: Matcher | None = None,
        limit_s: float = math.inf,
        costs: StepCosts | None = None,
    ) -> None:
        self.name = proposer.name
        self._limit_s, self._costs = limit_s, costs
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._matcher = matcher
        self._has_failed, self._is_first = False, True

    @property
    def native_drafts(self) -> NativeDrafts | None:
        """What makes the next proposals in native code; None under a grammar, or once the proposer has failed."""
        return None if self._has_failed or self._matcher else self._proposer.native_drafts

    @property
    def needs(self) -> StepOptions:
        """What the proposer needs from the step; nothing once it has failed."""
        if not self._has_failed:
            with self._catching("needs"):
                return self._proposer.needs
        return StepOptions()

    def begin(self, context: Context, sampling: Sampling, budget: Budget) -> None:
        """Let the proposer begin."""
        self._attempt("begin", partial(self._proposer.begin, context, sampling, budget))

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return the proposal within the budget, or a bare root when it breaks an invariant."""
        if not self._has_failed:
            with self._catching("propose"):
                began_s = time.monotonic()
                proposal = self._proposer.propose(context, sampling, budget)
                self._check_time(time.monotonic() - began_s)
                if self._matcher:
                    self._matcher.follow(context.output)
                    proposal = legal_drafts(self._matcher, proposal, sampling, self._proposer.needs)
                if not proposal.tree.num_nodes:
                    return proposal
                proposal = proposal.cut(budget)
                sound = self._well_sampled(proposal)
                TokenTree.checked(sound.tree.tokens, sound.tree.parents, self._vocab_size, budget.max_nodes)
                return sound
        return Proposal.plain()

    def observe(self, steps: Sequence[Step]) -> None:
        """Let the proposer learn."""
        if self._costs:
            self._costs.observe(steps)
        self._attempt("observe", partial(self._proposer.observe, steps))

    def close(self) -> None:
        """Free what the proposer holds; a failure here is logged and harms neither the request nor the target."""
        with self._catching("close"):
            self._proposer.close()

    def _check_time(self, took_s: float) -> None:
        """Give up on a proposer that is too slow; its first proposal, which reads the context, may take longer."""
        is_first, self._is_first = self._is_first, False
        if took_s > self._limit_s and not is_first:
            log.error("%s took %.0f ms: the request goes on without drafts", self.name, 1e3 * took_s)
            self._has_failed = True

    def _well_sampled(self, proposal: Proposal) -> Proposal:
        """Return the nodes above the first invalid q of each path; dropping them as well would bias the text."""
        sound = proposal.only(nodes_with_valid_q(proposal.tree, proposal.q, self._vocab_size))
        if sound is not proposal:
            num_bad = proposal.tree.num_nodes - sound.tree.num_nodes
            log.error("%s sampled %d nodes from a bad q: the request goes on without drafts", self.name, num_bad)
            self._has_failed = True
        return sound

    def _attempt(self, what: str, call: Callable[[], None]) -> None:
        if not self._has_failed:
            with self._catching(what):
                call()

    @contextmanager
    def _catching(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception:
            log.exception("%s failed in %s: the request goes on without drafts", self.name, what)
            self._has_failed = True
