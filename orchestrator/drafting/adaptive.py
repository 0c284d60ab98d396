"""Drafts only as large as pays off: a wrapper around any method's proposer, for the parameter `adaptive`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np

from orchestrator.core.context import Context
from orchestrator.core.cost_model import CostModel
from orchestrator.core.proposal import Budget, Proposal, Proposer, Step
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import MAX_NODES, TokenTree
from orchestrator.core.types import Acceptance, StepOptions
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.drafting.draft_costs import DraftCosts, LevelFigures
from orchestrator.drafting.estimates import range_of
from orchestrator.drafting.ledger import Meter
from orchestrator.drafting.ranks import RankEstimates, paying, paying_in_turn

#: A request rests for REST plain steps per request of its pass before it checks again whether a draft pays; MIN_REST
#: is the minimum where resting seems to save no time. A check ends the burst of the whole pass.
REST, MIN_REST = 64, 16
NO_DRAFT = Budget(0, 0)


class Purpose(Enum):
    """Why the next draft is made, which may have to wait for a step that returns hidden states."""

    NONE = "no draft is made"
    PAYS = "a draft pays"
    PROBE = "a probe is due, which shows whether drafts pay again"


class PendingDraft(NamedTuple):
    """What was drafted for the step that is not answered yet.

    was_called: the proposer was called, with a budget for a draft. is_sampled: its nodes were sampled from their q.
    """

    proposal: Proposal = Proposal.empty()
    was_called: bool = False
    is_sampled: bool = False


class Adaptive(Proposer):
    """Asks a proposer for as many levels as pay, and sends those of its nodes that pay.

    The probability of a level is how often some node of it was accepted after the level above; that of a node is the
    product, along its path, of how often nodes of the same depth and rank among their siblings were. Both decisions
    maximise the rate of the batch, (expected tokens + tokens of the others) ÷ seconds, time to draft included.
    Where no draft pays, plain steps follow, which the engine can run together and without the hidden states that a
    head needs; an occasional draft, a probe, shows whether that has changed.
    Invariant: both decisions depend on earlier steps and on the shape of the tree, never on its tokens. The shape and
    the time of a sampled draft follow from its tokens; so whether one of its nodes is sent depends on the nodes before
    it alone, not on the time that this draft took, and every acceptance rule keeps its distribution.
    num_levels: maximum levels that the proposer drafts. is_default: its parameters are the method's defaults, for which
    the process shares what it has learnt of the costs of levels.
    Source: γ from α and c, Leviathan et al. 2023, arXiv:2211.17192, section 3.5, with the price of a verified row;
    goodput, TurboSpec (arXiv:2406.14066).
    """

    def __init__(
        self,
        proposer: Proposer,
        dependencies: ProposerDependencies,
        num_levels: int = MAX_NODES,
        is_default: bool = True,
    ) -> None:
        self.name = proposer.name
        self._proposer, self._num_levels = proposer, num_levels
        self._estimates, self._counted_as = dependencies.estimates, dependencies.estimates.bounded(self.name)
        self._draft_costs = dependencies.draft_costs if is_default else DraftCosts()
        self._ranks, self._levels = RankEstimates(self._estimates, self._counted_as), LevelFigures()
        self._meter = Meter(dependencies.step_costs)
        self._draft, self._purpose = PendingDraft(), Purpose.NONE
        self._limits: Budget | None = None
        self._lacks_states = False  # the last step does not return the hidden states that the proposer needs
        self._catches_up = True  # the drafter reads the text that it has missed before its next draft
        self._has_reserved = False  # the share of the time for probes has been taken for a probe of this request
        self._num_in_pass = self._num_at_rest = dependencies.step_costs.num_in_pass  # now; when the rest began

    @property
    def num_plain(self) -> int:
        """Return the number of upcoming steps that will not draft, which is known while drafts pause."""
        return self._meter.num_plain

    @property
    def max_plain(self) -> int:
        """Return how many plain steps may run together now.

        A pause lasts until a burst ends for another reason if its own end would end the steps of other requests too.
        """
        return sys.maxsize if self.num_plain and self._num_in_pass > 1 else self.num_plain

    @property
    def options(self) -> StepOptions:
        """What the proposer needs from the step; nothing if no draft follows, so that the steps can be a burst."""
        return self._proposer.options if self._purpose is not Purpose.NONE and not self.num_plain else StepOptions()

    def begin(self, context: Context, sampling: Sampling, budget: Budget) -> None:
        """Choose the number of levels, and let the proposer begin."""
        if self.num_plain and 2 * self._num_in_pass <= self._num_at_rest:  # the load has halved since the rest began
            self.end_rest()
        self._limits = self._paying_budget(len(context), budget, sampling)
        if self._limits.max_depth:
            self._proposer.begin(context, sampling, self._limits)

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return the part of the proposer's tree that pays, or a bare root.

        A proposer whose draft has begun is still called, even if a pause begins now, and so is one that drafts nothing
        at this step, since it reads the new text.
        """
        costs = self._meter.begin(len(context))
        limits, self._limits = self._limits or self._paying_budget(len(context), budget, sampling), None
        drafted = self._proposer.propose(context, sampling, limits).cut(limits)
        proposal = drafted if costs else Proposal.empty()
        self._draft = PendingDraft(proposal, bool(limits.max_depth), bool(drafted.q) and sampling.rule.uses_q)
        if not self.num_plain:
            self._num_at_rest = self._num_in_pass
        # Checking whether a draft pays ends the burst of all requests that share the pass.
        first_rest = self._num_in_pass * REST if self._purpose is Purpose.NONE else 0
        self._meter.end(proposal, first_rest=first_rest, min_rest=self._num_in_pass * MIN_REST)
        expected_s = self._levels.seconds.value * limits.max_depth
        self._note_levels(proposal.tree)
        self._lacks_states = self.options != self._proposer.options
        return self._paying(costs, expected_s) if costs and proposal.tree.num_nodes else proposal

    def observe(self, tree: TokenTree, acceptance: Acceptance) -> None:
        """Learn how far the draft agrees with the text, and what the step cost.

        Nothing is learnt from sampled tokens that were not sent: they would be accepted more often than they match the
        text.
        """
        self._proposer.observe(tree, acceptance)
        self._learn(tree, acceptance, self._meter.observe(tree, acceptance))
        self._note_load(acceptance)

    def observe_plain(self, steps: Sequence[Step]) -> None:
        """Learn from the steps of a pause; only the first may follow a draft."""
        first, *others = steps
        self._proposer.observe(first.proposal.tree, first.acceptance)
        if others:
            self._proposer.observe_plain(others)
        step_s = self._meter.observe_plain([step.acceptance for step in steps]) / len(steps)
        self._learn(first.proposal.tree, first.acceptance, step_s)
        self._levels.idle_s += len(others) * step_s
        self._note_load(steps[-1].acceptance)

    def end_rest(self) -> None:
        """End a pause early, so that the next step checks whether a draft pays."""
        self._meter.end_rest()

    def close(self) -> None:
        """Free what the proposer holds."""
        self._proposer.close()

    def _paying_budget(self, context_len: int, budget: Budget, sampling: Sampling) -> Budget:
        """Return the budget with as many levels as pay; a draft that needs hidden states waits for a step with them."""
        self._purpose = Purpose.NONE
        if self.num_plain:
            return NO_DRAFT
        kind = self._counted_as, range_of(sampling), sampling.rule.uses_q
        self._ranks, self._levels = RankEstimates(self._estimates, *kind), self._draft_costs.levels(*kind)
        costs = self._meter.cost_model(context_len)
        depth = self._depth(budget, costs) if costs else 0
        if depth:
            self._purpose = Purpose.PAYS
        elif costs and self._reserve_probe():
            self._purpose = Purpose.PROBE
        levels = min(depth or 1, budget.max_depth, budget.max_nodes)
        if self._lacks_states or self._purpose is Purpose.NONE or not levels:
            return NO_DRAFT
        self._has_reserved = False
        return Budget(budget.max_nodes, levels)

    def _learn(self, tree: TokenTree, acceptance: Acceptance, step_s: float) -> None:
        """Learn from the decision on the last draft. step_s: what the step cost, 0 if that is unknown."""
        draft, self._draft = self._draft, PendingDraft()
        self._ranks.learn(tree if draft.is_sampled else draft.proposal.tree, acceptance.tokens(tree))
        if draft.was_called and self._purpose is Purpose.PROBE and step_s:
            self._levels.probe_s = self._levels.probe_s.updated(step_s * acceptance.num_in_pass)
        self._levels.idle_s = 0.0 if draft.was_called else self._levels.idle_s + step_s

    def _note_load(self, acceptance: Acceptance) -> None:
        if not acceptance.is_atypical:  # a pass that reads prompts may lack room for the usual steps
            self._num_in_pass = acceptance.num_in_pass

    def _reserve_probe(self) -> bool:
        """Reserve a probe for this request if one is due, never before its first step; return whether it has one."""
        if self._levels.may_probe and not self._meter.is_first:
            self._has_reserved, self._levels.idle_s = True, 0.0
        return self._has_reserved

    def _depth(self, budget: Budget, costs: CostModel) -> int:
        """Return the number of levels with the highest rate, γ for a chain; levels are assumed to be of recent size."""
        most = min(budget.max_depth, budget.max_nodes, self._num_levels)
        probabilities = np.cumprod([self._ranks.level_probability(depth) for depth in range(1, most + 1)])
        tokens = 1.0 + costs.others_tokens + np.concatenate([[0.0], np.cumsum(probabilities)])
        levels, level_rows = np.arange(most + 1), max(self._levels.rows.value, 1.0)
        rows = np.minimum(level_rows * levels, len(costs.seconds) - 1).astype(np.intp)
        rates = tokens / (costs.seconds[rows] + self._levels.seconds.value * levels)
        return int(rates.argmax()) if rates.max() > costs.rate_to_beat else 0

    def _note_levels(self, tree: TokenTree) -> None:
        """Note what the levels of the last draft cost.

        If the drafter had to catch up with the text before the draft, the time is an upper bound: it counts only if it
        is below the estimate. So an estimate that was once too high does not stay so forever.
        """
        depth = int(tree.depths.max()) if tree.num_nodes else 0
        level_s = self._meter.draft_s / depth if depth else 0.0
        if depth and (not self._catches_up or level_s < self._levels.seconds.value):
            self._levels.seconds = self._levels.seconds.updated(level_s)
            self._levels.rows = self._levels.rows.updated(tree.num_nodes / depth)
        self._catches_up = bool(self.num_plain) or (self._catches_up and not depth)

    def _paying(self, costs: CostModel, expected_s: float) -> Proposal:
        """Return the part of the draft that is sent. expected_s: its time, as estimated before it was sampled."""
        proposal = self._draft.proposal
        probabilities = self._ranks.path_probabilities(proposal.tree)
        if not self._draft.is_sampled:
            return proposal.only(paying(probabilities, costs, self._meter.draft_s))
        if self._purpose is Purpose.PROBE:  # nothing is learnt from what is not sent
            return proposal
        return proposal.only(paying_in_turn(proposal.tree, probabilities, costs, expected_s))
