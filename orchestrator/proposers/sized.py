"""Drafts as large as they pay: a wrapper around any method's proposer, for `draft_len` or `max_nodes` "auto"."""

from __future__ import annotations

import numpy as np

from orchestrator.core.context import Context
from orchestrator.core.proposal import Budget, Proposal, Proposer
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.step_costs import StepCosts, Surface
from orchestrator.core.tree import MAX_NODES, TokenTree
from orchestrator.core.types import Acceptance, StepOptions
from orchestrator.proposers.estimates import AcceptanceEstimates, range_of
from orchestrator.proposers.ledger import Meter
from orchestrator.proposers.ranks import RankEstimates, paying, paying_in_turn

#: Where no draft pays, one is made at every PROBE-th step, to see whether that has changed.
PROBE = 64
#: Weight of all earlier measurements in the mean time and in the mean rows of a level.
DISCOUNT = 0.9


class Sized(Proposer):
    """Asks a proposer for as many levels as pay, and sends those of its nodes that pay.

    The chance of a node is the product along its path of how often nodes of the same depth and rank among their
    siblings were accepted. Both decisions maximise the rate of the batch, (expected tokens + tokens of the others) ÷
    seconds, time to draft included.
    Invariant: they depend on earlier steps and on the shape of the tree, never on its tokens. Of a sampled draft, whose
    shape and time follow from its tokens, whether a node is sent depends on the nodes before it alone, and not on the
    time that this draft took, so that every acceptance rule keeps its law.
    num_levels: most levels that the proposer drafts.
    Source: γ from α and c, Leviathan et al. 2023, arXiv:2211.17192, section 3.5, with the price of a verified row;
    goodput, TurboSpec (arXiv:2406.14066).
    """

    def __init__(
        self, proposer: Proposer, costs: StepCosts, estimates: AcceptanceEstimates, num_levels: int = MAX_NODES
    ) -> None:
        self.name = proposer.name
        self._proposer, self._estimates, self._num_levels = proposer, estimates, num_levels
        self._ranks = RankEstimates(estimates, proposer.name)
        self._meter = Meter(costs)
        self._drafted = Proposal.empty()
        self._limits: Budget | None = None
        self._num_steps = 0
        self._level_s, self._level_rows = 0.0, 1.0
        self._is_sampled = self._is_probe = False

    @property
    def num_plain(self) -> int:
        """Return how many proposals are bare roots: while drafts pause, that is known beforehand."""
        return self._meter.num_plain

    @property
    def options(self) -> StepOptions:
        """What the proposer needs from the step."""
        return self._proposer.options

    def begin(self, context: Context, sampling: Sampling, budget: Budget) -> None:
        """Choose the number of levels, and let the proposer begin."""
        self._limits = self._within(budget, sampling)
        if self._limits.max_depth:
            self._proposer.begin(context, sampling, self._limits)

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return the part of the proposer's tree that pays, or a bare root."""
        surface = self._meter.begin()
        limits, self._limits = self._limits or self._within(budget, sampling), None
        drafted = Proposal.empty()
        if limits.max_depth:  # a proposer that has begun is heard, though a pause begins now
            drafted = self._proposer.propose(context, sampling, limits).cut(limits)
        self._drafted = drafted if surface else Proposal.empty()
        self._is_sampled = bool(drafted.q) and sampling.rule.uses_q
        self._meter.sent(self._drafted)
        expected_s = self._level_s * limits.max_depth
        self._note_levels(self._drafted.tree)
        return self._paying(surface, expected_s) if surface else self._drafted

    def observe(self, tree: TokenTree, acceptance: Acceptance) -> None:
        """Learn how far the draft agrees with the text, and what the step cost.

        A sampled token that was not sent teaches nothing: it would have been accepted more often than it comes.
        """
        self._proposer.observe(tree, acceptance)
        self._ranks.learn(tree if self._is_sampled else self._drafted.tree, acceptance.tokens(tree))
        self._drafted = Proposal.empty()  # of several plain steps only the first may follow a draft
        self._num_steps += 1
        self._meter.answered(tree, acceptance)

    def close(self) -> None:
        """Free what the proposer holds."""
        self._proposer.close()

    def _within(self, budget: Budget, sampling: Sampling) -> Budget:
        """Return the budget with as many levels as pay."""
        self._ranks = RankEstimates(self._estimates, self.name, range_of(sampling), sampling.rule.uses_q)
        surface = self._meter.surface()
        return Budget(budget.max_nodes, self._depth(budget, surface)) if surface else Budget(0, 0)

    def _depth(self, budget: Budget, surface: Surface) -> int:
        """Return the number of levels with the highest rate, γ for a chain; a level has as many rows as lately."""
        most = min(budget.max_depth, budget.max_nodes, self._num_levels)
        chances = np.cumprod([self._ranks.chance(depth, 0) for depth in range(1, most + 1)])
        tokens = 1.0 + surface.others_tokens + np.concatenate([[0.0], np.cumsum(chances)])
        levels = np.arange(most + 1)
        rows = np.minimum(self._level_rows * levels, len(surface.seconds) - 1).astype(np.intp)
        rates = tokens / (surface.seconds[rows] + self._level_s * levels)
        best = int(rates.argmax()) if rates.max() > surface.rate else 0
        self._is_probe = not (best or self._num_steps % PROBE)
        return min(most, 1) if self._is_probe else best

    def _note_levels(self, tree: TokenTree) -> None:
        """Note what the levels of the last draft cost."""
        levels = int(tree.depths.max())
        if levels and not self._meter.is_first:
            self._level_s = DISCOUNT * self._level_s + (1 - DISCOUNT) * self._meter.draft_s / levels
            self._level_rows = DISCOUNT * self._level_rows + (1 - DISCOUNT) * tree.num_nodes / levels

    def _paying(self, surface: Surface, expected_s: float) -> Proposal:
        """Return what is sent of the draft; expected_s: what was known of its time before it was sampled."""
        chances = self._ranks.path_chances(self._drafted.tree)
        if not self._is_sampled:
            return self._drafted.only(paying(chances, surface, self._meter.draft_s))
        if self._is_probe:  # nothing is learnt from what is not sent
            return self._drafted
        return self._drafted.only(paying_in_turn(self._drafted.tree, chances, surface, expected_s))
