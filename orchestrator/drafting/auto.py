"""The method `auto`: at every step the token tree that promises the most tokens per second, or no draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

from pydantic import Field

from orchestrator.core.arrays import FloatArray
from orchestrator.core.context import Context
from orchestrator.core.cost_model import CostModel
from orchestrator.core.proposal import Budget, NativeDrafts, Proposal, Proposer, Step
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import MAX_NODES, TokenTree
from orchestrator.core.types import Acceptance, StepOptions
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.drafting.estimates import range_of
from orchestrator.drafting.heads_of_auto import HeadsOfAuto
from orchestrator.drafting.ledger import Meter
from orchestrator.drafting.native_growth import growth_of
from orchestrator.drafting.parameters import MethodConfig
from orchestrator.drafting.ranks import paying
from orchestrator.drafting.union import united

#: After a step has run alone although native code could have drafted for it, this many more are expected to run alone.
NUM_SINGLE_STEPS = 32


class AutoConfig(MethodConfig):
    """max_nodes, draft_len: maximum draft nodes of a tree and of a path; fewer are sent where more would not pay.

    tree: trees, not only chains; unless the request sets it, a rule or an engine that takes no trees gets chains.
    """

    max_nodes: int = Field(48, ge=0, le=MAX_NODES)
    draft_len: int = Field(MAX_NODES, ge=1, le=MAX_NODES)
    tree: bool = True

    @property
    def is_chain(self) -> bool:
        """True when every draft is one path."""
        return not self.tree

    def as_chain(self) -> Self:
        """Return the parameters for chains only, unless the request sets `tree`."""
        return self if "tree" in self.model_fields_set else self.model_copy(update={"tree": False})


class Grown(NamedTuple):
    """A tree from all sources but the heads, the probabilities of its paths, and whether a head should draft too."""

    proposal: Proposal
    probabilities: FloatArray
    calls_head: bool


class Auto(Proposer):
    """Grows one tree from all sources of this process, as large as pays off; often it drafts nothing.

    The expected tokens E of a step are 1 + the sum of the path probabilities of the nodes that are sent. The tree
    maximises the rate of the batch, (E + tokens of the other requests) ÷ seconds of the pass and of drafting.
    Invariant: whether and how much is drafted depends only on what was known before the step's draw, so every
    acceptance rule keeps its distribution.
    Source: size by goodput, TurboSpec (arXiv:2406.14066); learning from drafts that were not sent, HedgeSpec
    (arXiv:2510.20064); docs/methods/auto.md.
    """

    name = "auto"

    def __init__(self, config: AutoConfig, dependencies: ProposerDependencies) -> None:
        self._limits = Budget(config.max_nodes, config.draft_len)
        self._growth = growth_of(dependencies, config.is_chain)
        self._heads = None if config.is_chain or not dependencies.drafters else HeadsOfAuto(dependencies)
        self._step_costs, self._clock = dependencies.step_costs, dependencies.step_costs.clock
        self._meter = Meter(self._step_costs)
        self._begun_s = 0.0
        self._begun: Grown | None = None
        self._native_drafts: NativeDrafts | None = None
        self._num_single_left = 0  # steps that are still expected to run alone

    @property
    def native_drafts(self) -> NativeDrafts | None:
        """What grows the next trees in native code; None while a head is in use or drafts pause."""
        return self._native_drafts

    @property
    def num_plain(self) -> int:
        """Return the number of upcoming steps that will not draft, which is known while drafts pause."""
        return self._meter.num_plain

    @property
    def options(self) -> StepOptions:
        """What the head in use needs from the step."""
        return self._heads.options if self._heads else StepOptions()

    def begin(self, context: Context, sampling: Sampling, budget: Budget) -> None:
        """Let a head begin its draft if it should draft for this step."""
        if self._heads and self._heads.name and (costs := self._meter.cost_model(len(context))):
            began_s, budget = self._clock(), budget.within(self._limits)
            self._begun = self._grow(context, sampling, budget, costs)
            if self._begun.calls_head:
                self._heads.begin(context, sampling, budget)
            self._begun_s = self._clock() - began_s

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return the best tree, or a bare root."""
        if self._meter.is_first:
            self._growth.begin(context)
        costs = self._meter.begin(len(context), self._begun_s)
        tokens_left, budget = budget.max_depth + 1, budget.within(self._limits)
        grown, self._begun, self._begun_s = self._begun, None, 0.0
        if costs and not grown:
            grown = self._grow(context, sampling, budget, costs)
        proposal = self._chosen(grown, context, sampling, budget, costs) if grown else Proposal.empty()
        if costs and self._heads and not self._meter.is_first:
            if self._step_costs.breaks_others:
                self._heads.let_go()
            else:
                self._heads.choose(self._meter.rate, tokens_left, costs, range_of(sampling))
        has_head = bool(self._heads and self._heads.name)
        self._native_drafts = self._growth.native_drafts(budget, costs) if costs and not has_head else None
        may_rest = not (has_head or (self._native_drafts and not self._num_single_left))
        self._meter.end(proposal, first_rest=int(may_rest))
        if self._meter.num_plain:
            self._native_drafts = None
        if self._heads:
            self._heads.note_pause(self._meter.num_plain)
        return proposal

    def _chosen(
        self, grown: Grown, context: Context, sampling: Sampling, budget: Budget, costs: CostModel | None
    ) -> Proposal:
        """Return the proposal that is sent; a head that has begun its draft is called even if a pause begins now."""
        if not (self._heads and grown.calls_head):
            return grown.proposal if costs else Proposal.empty()
        drafted = self._heads.propose(context, sampling, budget)
        return self._united(grown, drafted, costs).cut(budget) if costs else Proposal.empty()

    def observe(self, tree: TokenTree, acceptance: Acceptance) -> None:
        """Learn what the step cost, and how far the candidates agree with the text."""
        ran_alone = self._native_drafts and not acceptance.is_atypical
        self._num_single_left = NUM_SINGLE_STEPS if ran_alone else max(self._num_single_left - 1, 0)
        self._growth.learn(acceptance.tokens(tree))
        step_s = self._meter.observe(tree, acceptance)
        if self._heads:
            self._heads.observe(tree, acceptance, step_s)

    def observe_native(self, steps: Sequence[Step]) -> None:
        """Learn the cost of steps whose trees native code drafted; the growth has already learnt from the text."""
        self._num_single_left = 0
        self._growth.note_read(sum(step.acceptance.num_tokens for step in steps))
        seconds = self._meter.observe_native(steps)
        if self._heads:
            for (proposal, acceptance, *_), step_s in zip(steps, seconds, strict=True):
                self._heads.observe(proposal.tree, acceptance, step_s)

    def close(self) -> None:
        """Free what the heads hold."""
        if self._heads:
            self._heads.close()

    def _grow(self, context: Context, sampling: Sampling, budget: Budget, costs: CostModel) -> Grown:
        """Return the tree that is drafted without a head, and whether a head should draft too."""
        proposal = self._growth.grow(context, budget, costs, range_of(sampling))
        probabilities, num_nodes = self._growth.probabilities, proposal.tree.num_nodes
        tokens = 1.0 + costs.others_tokens + float(probabilities.sum())
        rate = tokens / float(costs.seconds[num_nodes]) if num_nodes else costs.rate_to_beat
        return Grown(proposal, probabilities, bool(self._heads and budget.max_depth and self._heads.wants(rate, costs)))

    def _united(self, grown: Grown, drafted: Proposal, costs: CostModel) -> Proposal:
        """Return the nodes of both trees that pay; the time to draft them is already spent."""
        assert self._heads
        drafted_probabilities = self._heads.ranks.probabilities(drafted.tree)
        proposal, probabilities = united(grown.proposal, grown.probabilities, drafted, drafted_probabilities)
        spent_s = self._clock() - self._meter.began_s
        return proposal.only(paying(probabilities, costs, spent_s))
