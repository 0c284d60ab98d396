"""Draft models and drafting heads (Medusa, EAGLE-1/2/3, ReDrafter); their clients know where they run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from orchestrator.core.context import Context
from orchestrator.core.proposal import Budget, NativeDrafts, Proposal, Proposer, Step
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import NO_HEAD_INPUT, Acceptance, DraftResponse, HeadInput, StepOptions
from orchestrator.proposers.dependencies import NO_ANSWER, ProposerDependencies
from orchestrator.proposers.drafter_configs import DrafterConfig, DraftModelConfig, HeadConfig
from orchestrator.proposers.thresholds import paying_thresholds
from orchestrator.wire.drafter import DrafterUse


class DrafterProposer(Proposer):
    """What the proposers of drafters share: after a draft, native code may go on calling the drafter by itself.

    Attribute _use: how native code can continue from the last draft; None if it cannot.
    """

    def __init__(
        self, config: DrafterConfig, num_levels: int, most_nodes: int, dependencies: ProposerDependencies
    ) -> None:
        """num_levels, most_nodes: the maximum levels and nodes of a draft."""
        self.name = dependencies.method.name
        self._client = dependencies.drafter_client(dependencies.method.drafter)
        self._step_costs, self._draft_costs = dependencies.step_costs, dependencies.draft_costs
        self._num_levels, self._most_nodes = num_levels, most_nodes
        self._follows_costs = config.min_prob is None and most_nodes > 0
        self._has_been_called = False
        self._use: DrafterUse | None = None

    @property
    def num_plain(self) -> int:
        """Return the number of upcoming steps that will not draft: all, once the drafter cannot serve this text."""
        return sys.maxsize if self._client.has_given_up else 0

    @property
    def native_drafts(self) -> NativeDrafts | None:
        """What makes the next proposals in native code, if the drafter is native code in the engine's process."""
        use = self._use
        if not use:
            return None
        limits = use.request.max_nodes, use.request.max_depth
        return NativeDrafts(use, *limits, (self.name,), options=self.options)

    def observe(self, tree: TokenTree, acceptance: Acceptance) -> None:
        """Note that the drafter has not read the tokens of this step, since it did not run in native code."""
        self._use = None

    def observe_plain(self, steps: Sequence[Step]) -> None:
        """Do as for a single step: steps that run together bring no hidden states."""
        self.observe(steps[-1].proposal.tree, steps[-1].acceptance)

    def observe_native(self, steps: Sequence[Step]) -> None:
        """Note how long the drafts took that are not merged with those of others."""
        for step in steps:
            if step.draft_s and set(step.proposal.sources) <= {self.name}:
                self._note_draft(step.proposal.tree, step.draft_s)

    def close(self) -> None:
        """End the drafter's sequence."""
        self._client.close()

    def _draft(self, context: Context, sampling: Sampling, budget: Budget, head: HeadInput) -> DraftResponse:
        """Call the drafter; the time of a request's first call, which reads the prompt, says little of later ones."""
        began_s = self._step_costs.clock()
        response = self._client.propose(context, sampling, budget, head)
        if self._has_been_called and response is not NO_ANSWER:
            self._note_draft(response.tree, self._step_costs.clock() - began_s)
        self._has_been_called = True
        return response

    def _note_draft(self, tree: TokenTree, draft_s: float) -> None:
        """Note the time of a draft: its last level may have been drafted and hold no node."""
        if not self._step_costs.shares_passes:
            self._draft_costs.note_draft(self.name, min(int(tree.depths.max()) + 1, self._num_levels), draft_s)

    def _as_pays(self, head: HeadInput, sampling: Sampling, context: Context) -> HeadInput:
        """Return the drafter's input with the thresholds that follow from what rows and levels cost now.

        sampling: the request's. Constants remain where the request sets min_prob, where the text depends on the drafts
        (that of a seed would otherwise depend on measured times), before the costs are known, and while others share
        the passes, where `Adaptive` chooses the sizes.
        """
        level = self._draft_costs.level_s.get(self.name)
        if not (self._follows_costs and level and sampling.is_independent_of_drafts) or self._step_costs.shares_passes:
            return head
        costs = self._step_costs.cost_model(len(context))
        if costs is None:
            return head
        return replace(head, **paying_thresholds(costs, level.value, self._most_nodes)._asdict())

    @property
    def _has_draft(self) -> bool:
        """True if native code has already drafted after the last step."""
        return self._use is not None and self._use.following is not None

    def _take_draft(self, budget: Budget, head: HeadInput) -> Proposal:
        """Return the draft that native code has made. budget, head: for the drafts after it."""
        assert self._use and self._use.following is not None
        tree, self._use.following = self._use.following, None
        self._use.request = replace(
            self._use.request, max_nodes=budget.max_nodes, max_depth=budget.max_depth, head=head
        )
        return Proposal.of(tree, self.name)


class DraftModel(DrafterProposer):
    """A draft language model that proposes a chain or a tree in one call."""

    def __init__(self, config: DraftModelConfig, dependencies: ProposerDependencies) -> None:
        most_nodes = min(config.max_nodes, config.draft_len) if config.is_chain else config.max_nodes
        super().__init__(config, config.draft_len, most_nodes, dependencies)
        self._config = config.resolved(dependencies.has_cheap_rows)

    def begin(self, context: Context, sampling: Sampling, budget: Budget) -> None:
        """Begin the call of the draft model."""
        budget = self._of_draft(budget)
        if budget.max_nodes and not self._has_draft:
            self._client.begin(context, *self._call(context, sampling, budget))

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return the draft model's chain or tree, no deeper than draft_len."""
        budget = self._of_draft(budget)
        if not budget.max_nodes:
            return Proposal.empty()
        sampling, budget, head = self._call(context, sampling, budget)
        if self._has_draft:
            return self._take_draft(budget, head)
        response = self._draft(context, sampling, budget, head)
        self._use = self._client.use
        return Proposal(response.tree, (self.name,) * response.tree.num_nodes, response.q)

    def _call(self, context: Context, sampling: Sampling, budget: Budget) -> tuple[Sampling, Budget, HeadInput]:
        """Return what the draft model's call has besides the context."""
        head = self._as_pays(self._config.shape, sampling, context)
        sampling = self._config.draft_sampling(sampling)
        return sampling, budget, self._config.under(sampling, head)

    def _of_draft(self, budget: Budget) -> Budget:
        """Return the draft's share of a budget; in a union, the next share of nodes may be larger, the depth not."""
        depth = min(self._config.draft_len, budget.max_depth)
        length = budget.clipped(depth)
        return Budget(length if self._config.is_chain or not length else budget.max_nodes, depth)


class HeadProposer(DrafterProposer):
    """Passes the target's hidden states to a head, and requests from the next step those that the head still lacks.

    Invariant: after a step the newest state is the one from which the target sampled the root. Before the first step
    there is no state, and a head without a cache proposes nothing.
    """

    def __init__(self, config: HeadConfig, dependencies: ProposerDependencies) -> None:
        super().__init__(config, config.num_levels, config.max_nodes, dependencies)
        self._method = dependencies.method
        self._config = config.resolved(dependencies.has_cheap_rows)
        self._lacks_from = 0
        self._features: HeadInput | None = None

    @property
    def options(self) -> StepOptions:
        """The hidden states that the head lacks: only the newest if the head has no cache or does not answer."""
        if not self._config.max_nodes or self._client.has_given_up:
            return StepOptions()
        return StepOptions(features_from=self._lacks_from, hidden_states=self._method.hidden_states)

    def begin(self, context: Context, sampling: Sampling, budget: Budget) -> None:
        """Begin the call of the head."""
        head, sampling, budget = self._call(context, sampling, budget)
        if budget.max_nodes and not self._has_draft:
            self._client.begin(context, sampling, budget, head)

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return the head's tree."""
        head, sampling, budget = self._call(context, sampling, budget)
        self._features = None
        if not self._method.reads_every_state:
            self._lacks_from = len(context) - 1
        if self._has_draft and budget.max_nodes:
            return self._take_draft(budget, head)
        self._use = None
        if not budget.max_nodes:
            return Proposal.empty()
        response = self._draft(context, sampling, budget, head)
        has_read = head.features is not None and response.cached_len == len(context) - 1
        self._use = self._client.use if has_read else None
        if self._method.reads_every_state:
            self._lacks_from = response.cached_len if response.cached_len >= 0 else len(context) - 1
        return Proposal(response.tree, (self.name,) * response.tree.num_nodes, response.q)

    def _call(self, context: Context, sampling: Sampling, budget: Budget) -> tuple[HeadInput, Sampling, Budget]:
        """Return the head's input and the budget of its tree, which has no nodes if the head should not be called."""
        depth = min(self._config.num_levels, budget.max_depth)
        if not depth:
            return NO_HEAD_INPUT, sampling, Budget(0, 0)
        head = self._as_pays(self._features or self._config.shape, sampling, context)
        sampling = self._config.draft_sampling(sampling)
        # The first call tells how much of the text a head with a cache already has.
        is_first_call = self._method.reads_every_state and not self._has_been_called
        can_draft = head.features is not None or is_first_call or self._has_draft
        return self._config.under(sampling, head), sampling, Budget(budget.max_nodes if can_draft else 0, depth)

    def observe(self, tree: TokenTree, acceptance: Acceptance) -> None:
        """Keep the new states for the next call; a head without a cache gets only the newest."""
        super().observe(tree, acceptance)
        features, start = acceptance.features, acceptance.features_start
        if features is None:
            return
        if not self._method.reads_every_state:
            features, start = features[-1:], start + len(features) - 1
        self._features = replace(self._config.shape, features=features, features_start=start)

    def observe_native(self, steps: Sequence[Step]) -> None:
        """Note up to where the head has read the hidden states in native code."""
        assert self._use
        super().observe_native(steps)
        self._lacks_from = self._use.num_read - 1
