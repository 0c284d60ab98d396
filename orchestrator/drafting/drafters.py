"""Draft models and drafting heads (Medusa, EAGLE-1/2/3, ReDrafter); their clients know where they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.core.context import Context
from orchestrator.core.messages.drafter import DrafterUse
from orchestrator.core.proposal import Budget, NativeDrafts, Proposal, Proposer, Step
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.types import NO_HEAD_INPUT, HeadInput, StepOptions
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.drafting.drafter_configs import DraftModelConfig, HeadConfig

#: Steps that may run together while a drafter rests.
REST = 16


class DrafterProposer(Proposer):
    """What the proposers of drafters share: after a draft, native code may go on calling the drafter by itself.

    Attribute _use: how native code can continue from the last draft; None if it cannot.
    """

    def __init__(self, dependencies: ProposerDependencies) -> None:
        self.name = dependencies.method.name
        self._client = dependencies.drafter_client(dependencies.method.drafter)
        self._use: DrafterUse | None = None
        self._costs, self._max_sequences = dependencies.step_costs, dependencies.draft_max_sequences
        self._rests = False

    def _must_rest(self, sampling: Sampling) -> bool:
        """Return whether the drafter should not draft now: too many sequences share the target's passes.

        Where the text depends on the drafts, the load must not change it, and the drafter always drafts.
        """
        is_crowded = self._costs.num_sequences > self._max_sequences
        self._rests = self._client.has_given_up or (is_crowded and sampling.is_independent_of_drafts)
        if self._rests:
            self._use = None
        return self._rests

    def _rest(self) -> Proposal:
        """Return no draft, and how many steps may run together before the drafter is asked again."""
        return Proposal.plain() if self._client.has_given_up else Proposal.plain(REST)

    @property
    def native_drafts(self) -> NativeDrafts | None:
        """What makes the next proposals in native code, if the drafter is native code in the engine's process."""
        use = self._use
        if not use:
            return None
        limits = use.request.max_nodes, use.request.max_depth
        return NativeDrafts(use, *limits, (self.name,), options=self.needs)

    def observe(self, steps: Sequence[Step]) -> None:
        """Note whether the drafter has read the tokens of the steps, as it has if native code called it."""
        if not steps[-1].is_native:
            self._use = None

    def close(self) -> None:
        """End the drafter's sequence."""
        self._client.close()

    @property
    def _has_draft(self) -> bool:
        """True if native code has already drafted after the last step."""
        return self._use is not None and self._use.following is not None

    def _take_draft(self, budget: Budget) -> Proposal:
        """Return the draft that native code has made. budget: for the drafts after it."""
        assert self._use and self._use.following is not None
        tree, self._use.following = self._use.following, None
        self._use.request = replace(self._use.request, max_nodes=budget.max_nodes, max_depth=budget.max_depth)
        return Proposal.of(tree, self.name)


class DraftModel(DrafterProposer):
    """A draft language model that proposes a chain or a tree in one call."""

    def __init__(self, config: DraftModelConfig, dependencies: ProposerDependencies) -> None:
        super().__init__(dependencies)
        self._config = config.resolved(dependencies.has_cheap_rows)

    def begin(self, context: Context, sampling: Sampling, budget: Budget) -> None:
        """Begin the call of the draft model."""
        budget = self._of_draft(budget)
        if budget.max_nodes and not (self._must_rest(sampling) or self._has_draft):
            self._client.begin(context, *self._call(sampling, budget))

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return the draft model's chain or tree, no deeper than draft_len."""
        budget = self._of_draft(budget)
        if self._must_rest(sampling):
            return self._rest()
        if not budget.max_nodes:
            return Proposal.empty()
        if self._has_draft:
            return self._take_draft(budget)
        response = self._client.propose(context, *self._call(sampling, budget))
        self._use = self._client.use
        return Proposal(response.tree, (self.name,) * response.tree.num_nodes, response.q)

    def _call(self, sampling: Sampling, budget: Budget) -> tuple[Sampling, Budget, HeadInput]:
        """Return what the draft model's call has besides the context."""
        sampling = self._config.draft_sampling(sampling)
        return sampling, budget, self._config.under(sampling, self._config.shape)

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
        super().__init__(dependencies)
        self._method = dependencies.method
        self._config = config.resolved(dependencies.has_cheap_rows)
        self._lacks_from = 0
        self._features: HeadInput | None = None
        self._has_been_called = False

    @property
    def needs(self) -> StepOptions:
        """The hidden states that the head lacks: only the newest if the head has no cache or does not answer."""
        if not self._config.max_nodes or self._rests or self._client.has_given_up:
            return StepOptions()
        return StepOptions(features_from=self._lacks_from, hidden_states=self._method.hidden_states)

    def begin(self, context: Context, sampling: Sampling, budget: Budget) -> None:
        """Begin the call of the head."""
        if self._must_rest(sampling):
            return
        head, sampling, budget = self._call(sampling, budget)
        if budget.max_nodes and not self._has_draft:
            self._client.begin(context, sampling, budget, head)

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return the head's tree."""
        must_rest = self._must_rest(sampling)
        head, sampling, budget = self._call(sampling, budget)
        self._features = None
        if not self._method.reads_every_state:
            self._lacks_from = len(context) - 1
        if must_rest:
            return self._rest()
        if self._has_draft and budget.max_nodes:
            return self._take_draft(budget)
        self._use = None
        if not budget.max_nodes:
            return Proposal.empty()
        response = self._client.propose(context, sampling, budget, head)
        has_read = head.features is not None and response.cached_len == len(context) - 1
        self._use = self._client.use if has_read else None
        self._has_been_called = True
        if self._method.reads_every_state:
            self._lacks_from = response.cached_len if response.cached_len >= 0 else len(context) - 1
        return Proposal(response.tree, (self.name,) * response.tree.num_nodes, response.q)

    def _call(self, sampling: Sampling, budget: Budget) -> tuple[HeadInput, Sampling, Budget]:
        """Return the head's input and the budget of its tree, which has no nodes if the head should not be called."""
        depth = min(self._config.num_levels, budget.max_depth)
        if not depth:
            return NO_HEAD_INPUT, sampling, Budget(0, 0)
        sampling, head = self._config.draft_sampling(sampling), self._features or self._config.shape
        # The first call tells how much of the text a head with a cache already has.
        is_first_call = self._method.reads_every_state and not self._has_been_called
        can_draft = head.features is not None or is_first_call or self._has_draft
        return self._config.under(sampling, head), sampling, Budget(budget.max_nodes if can_draft else 0, depth)

    def observe(self, steps: Sequence[Step]) -> None:
        """Keep the new states for the next call; a head without a cache gets only the newest.

        After steps of native code, note up to where the head has read the states there.
        """
        super().observe(steps)
        if self._use:
            self._lacks_from = self._use.num_read - 1
        features, start = steps[-1].acceptance.features, steps[-1].acceptance.features_start
        if features is None:
            return
        if not self._method.reads_every_state:
            features, start = features[-1:], start + len(features) - 1
        self._features = replace(self._config.shape, features=features, features_start=start)
