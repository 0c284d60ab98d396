"""The proposer for engines that draft by themselves: it proposes nothing and lets the engine draft."""

from __future__ import annotations

from pydantic import Field

from orchestrator.core.context import Context
from orchestrator.core.errors import RequestError
from orchestrator.core.proposal import Budget, Proposal, Proposer
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import MAX_NODES, TokenTree
from orchestrator.core.types import EngineSpeculation, StepOptions
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.drafting.parameters import WHERE, Choices, MethodConfig


class EngineSideConfig(MethodConfig):
    """No parameter can be changed: the size of the trees was fixed when the engine was built."""

    max_nodes: int = Field(MAX_NODES, ge=MAX_NODES, le=MAX_NODES)

    def request(self, length: int) -> EngineSpeculation:
        """Return the speculation that a step requests; raises RequestError when the parameters do not fit together."""
        return EngineSpeculation(length)


class EngineSideLookaheadConfig(EngineSideConfig):
    """window, ngram, guesses: W, N and G, either all set or all left at the engine's built-in maxima."""

    window: int = Field(0, ge=1, le=MAX_NODES)
    ngram: int = Field(0, ge=1, le=MAX_NODES)
    guesses: int = Field(0, ge=0, le=MAX_NODES)

    def request(self, length: int) -> EngineSpeculation:
        """Return the speculation that a step requests from the engine; raises RequestError when a size is missing."""
        sizes = (self.window, self.ngram, self.guesses)
        if not any(sizes):
            return EngineSpeculation(length)
        if not (self.window and self.ngram):
            raise RequestError(
                f"window, ngram and guesses go together for this engine, got {', '.join(map(str, sizes))} ({WHERE})"
            )
        return EngineSpeculation(length, sizes=sizes)


class EngineSideEagleConfig(EngineSideConfig):
    """choices: the tree of ranks, as all its nodes or as its leaf paths; empty = the engine's own."""

    choices: Choices = TokenTree.bare()

    def request(self, length: int) -> EngineSpeculation:
        """Return the speculation that a step requests from the engine."""
        return EngineSpeculation(length, choices=tuple(self.choices.paths[1:]))


class EngineSideProposer(Proposer):
    """Proposes the bare root, and asks the engine to draft."""

    def __init__(self, config: EngineSideConfig, dependencies: ProposerDependencies) -> None:
        """Raises RequestError when the parameters do not fit together."""
        self.name = dependencies.method.name
        self._config = config
        self._request = config.request(1)

    @property
    def needs(self) -> StepOptions:
        """The request for the engine's own speculation."""
        return StepOptions(engine_speculation=self._request)

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return no draft; the engine may commit a token for each level of the budget, and one more."""
        self._request = self._config.request(budget.max_depth + 1)
        return Proposal.empty()
