"""Methods of engines that draft by themselves: nothing is proposed, the engine is asked to (docs/tensorrt-llm.md)."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.choices import read_choices
from orchestrator.context import Context
from orchestrator.errors import RequestError
from orchestrator.proposal import Budget, Proposal, Proposer
from orchestrator.sampling_params import Sampling
from orchestrator.settings import WHERE, MethodConfig, parsed, whole
from orchestrator.tree import MAX_NODES, TokenTree
from orchestrator.types import Inside, Want


@dataclass(frozen=True, kw_only=True)
class InsideConfig(MethodConfig):
    """Nothing to choose: the engine's trees are as large as it was built for."""

    max_nodes: int = whole(MAX_NODES, MAX_NODES, MAX_NODES)

    def asked(self, length: int) -> Inside:
        """Return what a step asks for; raises RequestError when the parameters do not fit together."""
        return Inside(length)


@dataclass(frozen=True, kw_only=True)
class InsideLookaheadConfig(InsideConfig):
    """window, ngram, guesses: W, N, G, all three or none; none = as the engine was built, which is the most."""

    window: int = whole(0, 1, MAX_NODES)
    ngram: int = whole(0, 1, MAX_NODES)
    guesses: int = whole(0, 0, MAX_NODES)

    def asked(self, length: int) -> Inside:
        """Return what a step asks for; raises RequestError when a size is missing."""
        sizes = (self.window, self.ngram, self.guesses)
        if not any(sizes):
            return Inside(length)
        if not (self.window and self.ngram):
            raise RequestError(
                f"window, ngram and guesses go together for this engine, got {', '.join(map(str, sizes))} ({WHERE})"
            )
        return Inside(length, sizes=sizes)


@dataclass(frozen=True, kw_only=True)
class InsideEagleConfig(InsideConfig):
    """choices: the tree of ranks, as all its nodes or as its leaf paths; none = the engine's own."""

    choices: TokenTree = parsed(TokenTree.bare(), read_choices)  # noqa: RUF009 - it declares a field

    def asked(self, length: int) -> Inside:
        """Return what a step asks for."""
        return Inside(length, choices=tuple(self.choices.paths[1:]))


class InsideProposer(Proposer):
    """Proposes the bare root, and wants the engine's own drafts."""

    def __init__(self, name: str, config: InsideConfig) -> None:
        """Raises RequestError when the parameters do not fit together."""
        self.name = name
        self._config = config
        self._asked = config.asked(1)

    @property
    def want(self) -> Want:
        """That the engine drafts."""
        return Want(inside=self._asked)

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return no draft; what may still come is a level of the budget and the token behind it."""
        self._asked = self._config.asked(budget.max_depth + 1)
        return Proposal.none()
