"""Drafts that are adapted while other requests share the passes, and left alone elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.core.context import Context
from orchestrator.core.proposal import Budget, NativeDrafts, Proposal, Proposer, Step
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.step_costs import StepCosts
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, StepOptions
from orchestrator.drafting.adaptive import Adaptive


class AdaptiveWhereShared(Proposer):
    """Leaves a request's drafts as they are while no other request shares its passes, and adapts them while others do.

    So a method that does not pay under load costs the other requests little.
    Invariant: drafts are adapted only where the text does not depend on them; elsewhere a seed's text would change with
    the load.
    """

    def __init__(self, proposer: Proposer, adaptive: Adaptive, costs: StepCosts) -> None:
        """costs: those of all requests; until this request's first step, they tell whether passes are shared."""
        self.name = proposer.name
        self._proposer, self._adaptive, self._is_shared = proposer, adaptive, costs.shares_passes
        self._costs = costs
        self._used: Proposer = proposer

    @property
    def num_plain(self) -> int:
        """Return the number of upcoming steps that will not draft."""
        return self._used.num_plain

    @property
    def max_plain(self) -> int:
        """Return how many plain steps may run together now."""
        return self._used.max_plain

    @property
    def native_drafts(self) -> NativeDrafts | None:
        """What makes the next proposals in native code."""
        return self._used.native_drafts

    @property
    def options(self) -> StepOptions:
        """What the proposer needs from the step."""
        return self._used.options

    def begin(self, context: Context, sampling: Sampling, budget: Budget) -> None:
        """Let the proposer begin."""
        self._choose(sampling)
        self._used.begin(context, sampling, budget)

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return the proposer's draft, or the part of it that pays."""
        self._choose(sampling)
        return self._used.propose(context, sampling, budget)

    def observe(self, tree: TokenTree, acceptance: Acceptance) -> None:
        """Learn, and see whether others share the passes."""
        self._used.observe(tree, acceptance)
        self._note_load(acceptance)

    def observe_plain(self, steps: Sequence[Step]) -> None:
        """Learn, and see whether others share the passes."""
        self._used.observe_plain(steps)
        self._note_load(steps[-1].acceptance)

    def observe_native(self, steps: Sequence[Step]) -> None:
        """Learn, and see whether others share the passes."""
        self._used.observe_native(steps)
        self._note_load(steps[-1].acceptance)

    def close(self) -> None:
        """Free what the proposer holds."""
        self._proposer.close()

    def _choose(self, sampling: Sampling) -> None:
        used = self._adaptive if self._is_shared and sampling.is_independent_of_drafts else self._proposer
        if used is not self._adaptive and self._used is self._adaptive:
            self._adaptive.end_rest()
        self._used = used

    def _note_load(self, acceptance: Acceptance) -> None:
        """Note whether passes are shared, ignoring those that read prompts, which may lack room for the usual steps."""
        if acceptance.is_atypical:
            return
        self._is_shared = acceptance.num_in_pass > 1
        if self._used is not self._adaptive:
            self._costs.observe_load(acceptance.num_in_pass)
