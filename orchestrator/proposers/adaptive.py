"""Drafts as large as they pay: a wrapper around any method's proposer, for `draft_len` or `max_nodes` "auto"."""

from __future__ import annotations

import numpy as np

from orchestrator.core.context import Context
from orchestrator.core.proposal import Budget, Proposal, Proposer
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.step_costs import Surface
from orchestrator.core.tree import MAX_NODES, TokenTree
from orchestrator.core.types import Acceptance, StepOptions
from orchestrator.proposers.dependencies import ProposerDependencies
from orchestrator.proposers.estimates import range_of
from orchestrator.proposers.ledger import Meter
from orchestrator.proposers.ranks import RankEstimates, paying, paying_in_turn

#: Most plain steps that are made before looking again whether a draft pays.
LONGEST_REST = 64


class Adaptive(Proposer):
    """Asks a proposer for as many levels as pay, and sends those of its nodes that pay.

    The chance of a node is the product along its path of how often nodes of the same depth and rank among their
    siblings were accepted. Both decisions maximise the rate of the batch, (expected tokens + tokens of the others) ÷
    seconds, time to draft included.
    Where no draft pays, plain steps follow that the engine can make together, without the hidden states that a head
    needs; and a draft is made all the same now and then, to see whether that has changed.
    Invariant: they depend on earlier steps and on the shape of the tree, never on its tokens. Of a sampled draft, whose
    shape and time follow from its tokens, whether a node is sent depends on the nodes before it alone, and not on the
    time that this draft took, so that every acceptance rule keeps its law.
    num_levels: most levels that the proposer drafts.
    Source: γ from α and c, Leviathan et al. 2023, arXiv:2211.17192, section 3.5, with the price of a verified row;
    goodput, TurboSpec (arXiv:2406.14066).
    """

    def __init__(self, proposer: Proposer, dependencies: ProposerDependencies, num_levels: int = MAX_NODES) -> None:
        self.name = proposer.name
        self._proposer, self._num_levels = proposer, num_levels
        self._estimates, self._draft_costs = dependencies.estimates, dependencies.draft_costs
        self._ranks = RankEstimates(self._estimates, self.name)
        self._levels = self._draft_costs.levels(self.name)
        self._meter = Meter(dependencies.step_costs)
        self._drafted = Proposal.empty()
        self._limits: Budget | None = None
        self._is_sampled = self._is_probe = self._wants_draft = self._lacks_states = False
        self._catches_up = True

    @property
    def num_plain(self) -> int:
        """Return how many proposals are bare roots: while drafts pause, that is known beforehand."""
        return self._meter.num_plain

    @property
    def options(self) -> StepOptions:
        """What the proposer needs from the step; in a pause nothing, so that its steps can be made together."""
        return StepOptions() if self.num_plain else self._proposer.options

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
        self._meter.sent(self._drafted, first_rest=0 if self._wants_draft else LONGEST_REST)
        expected_s = self._levels.seconds.value * limits.max_depth
        self._note_levels(self._drafted.tree)
        self._lacks_states = bool(self.num_plain) and self._proposer.options != StepOptions()
        return self._paying(surface, expected_s) if surface else self._drafted

    def observe(self, tree: TokenTree, acceptance: Acceptance) -> None:
        """Learn how far the draft agrees with the text, and what the step cost.

        A sampled token that was not sent teaches nothing: it would have been accepted more often than it comes.
        """
        has_drafted = bool(self._drafted.tree.num_nodes)
        self._proposer.observe(tree, acceptance)
        self._ranks.learn(tree if self._is_sampled else self._drafted.tree, acceptance.tokens(tree))
        self._drafted = Proposal.empty()  # of several plain steps only the first may follow a draft
        step_s = self._meter.answered(tree, acceptance)
        if has_drafted and self._is_probe:
            self._levels.probe_s = self._levels.probe_s.of(step_s)
        self._levels.idle_s = 0.0 if has_drafted else self._levels.idle_s + step_s

    def close(self) -> None:
        """Free what the proposer holds."""
        self._proposer.close()

    def _within(self, budget: Budget, sampling: Sampling) -> Budget:
        """Return the budget with as many levels as pay; a draft that needs hidden states waits for a step with them."""
        kind = self.name, range_of(sampling), sampling.rule.uses_q
        self._ranks, self._levels = RankEstimates(self._estimates, *kind), self._draft_costs.levels(*kind)
        surface = self._meter.surface()
        depth = self._depth(budget, surface) if surface else 0
        self._is_probe = bool(surface) and not depth and self._levels.may_probe
        self._wants_draft = bool(depth or self._is_probe)
        if self._lacks_states or not self._wants_draft:
            return Budget(0, 0)
        self._levels.idle_s = 0.0  # of several requests one makes the probe
        return Budget(budget.max_nodes, min(depth or 1, budget.max_depth, budget.max_nodes))

    def _depth(self, budget: Budget, surface: Surface) -> int:
        """Return the number of levels with the highest rate, γ for a chain; a level has as many rows as lately."""
        most = min(budget.max_depth, budget.max_nodes, self._num_levels)
        chances = np.cumprod([self._ranks.chance(depth, 0) for depth in range(1, most + 1)])
        tokens = 1.0 + surface.others_tokens + np.concatenate([[0.0], np.cumsum(chances)])
        levels, level_rows = np.arange(most + 1), max(self._levels.rows.value, 1.0)
        rows = np.minimum(level_rows * levels, len(surface.seconds) - 1).astype(np.intp)
        rates = tokens / (surface.seconds[rows] + self._levels.seconds.value * levels)
        return int(rates.argmax()) if rates.max() > surface.rate else 0

    def _note_levels(self, tree: TokenTree) -> None:
        """Note what the levels of the last draft cost, unless the drafter had to catch up with the text first."""
        depth = int(tree.depths.max())
        if depth and not self._catches_up:
            self._levels.seconds = self._levels.seconds.of(self._meter.draft_s / depth)
            self._levels.rows = self._levels.rows.of(tree.num_nodes / depth)
        self._catches_up = bool(self.num_plain) or (self._catches_up and not depth)

    def _paying(self, surface: Surface, expected_s: float) -> Proposal:
        """Return what is sent of the draft; expected_s: what was known of its time before it was sampled."""
        chances = self._ranks.path_chances(self._drafted.tree)
        if not self._is_sampled:
            return self._drafted.only(paying(chances, surface, self._meter.draft_s))
        if self._is_probe:  # nothing is learnt from what is not sent
            return self._drafted
        return self._drafted.only(paying_in_turn(self._drafted.tree, chances, surface, expected_s))


class AdaptiveWhereShared(Proposer):
    """Leaves a request's drafts as they are while it has its passes to itself, and adapts them where others share them.

    So a method that does not pay under load costs the requests beside it nothing.
    Invariant: drafts are adapted only where the text does not depend on them; elsewhere a seed's text would change with
    the load.
    """

    def __init__(self, proposer: Proposer, adaptive: Adaptive) -> None:
        self.name = proposer.name
        self._proposer, self._adaptive = proposer, adaptive
        self._used: Proposer = proposer
        self._may_adapt = False

    @property
    def num_plain(self) -> int:
        """Return how many proposals are bare roots."""
        return self._used.num_plain

    @property
    def options(self) -> StepOptions:
        """What the proposer needs from the step."""
        return self._used.options

    def begin(self, context: Context, sampling: Sampling, budget: Budget) -> None:
        """Let the proposer begin."""
        self._used.begin(context, sampling, budget)

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return the proposer's draft, or the part of it that pays."""
        self._may_adapt = sampling.is_independent_of_drafts
        return self._used.propose(context, sampling, budget)

    def observe(self, tree: TokenTree, acceptance: Acceptance) -> None:
        """Learn, and see whether the request still shares its passes; a pause is ended first."""
        self._used.observe(tree, acceptance)
        if not self.num_plain:
            is_shared = acceptance.num_in_pass > 1 and self._may_adapt
            self._used = self._adaptive if is_shared else self._proposer

    def close(self) -> None:
        """Free what the proposer holds."""
        self._proposer.close()
