"""A neural drafter in another process, asked through a bounded, breakable line; its answer is a hint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from orchestrator.context import Context
from orchestrator.proposal import Budget, Proposal, Proposer
from orchestrator.sampling_params import Sampling
from orchestrator.settings import MethodConfig, whole
from orchestrator.tree import MAX_NODES, TokenTree
from orchestrator.types import Drafted, HeadInput, Want
from orchestrator.wire_head import NO_HEAD_INPUT

#: What a line says for a drafter that is silent, fails or talks nonsense.
NO_ANSWER = Drafted(TokenTree.bare(), cached_len=-1)


class DraftLine(Protocol):
    """One request's line to a drafter; never raises and never blocks beyond its limit."""

    @property
    def gave_up(self) -> bool:
        """True when the drafter cannot serve this request, and is not asked any more."""

    def propose(self, context: Context, sampling: Sampling, budget: Budget, head: HeadInput = NO_HEAD_INPUT) -> Drafted:
        """Return the drafter's tree, or NO_ANSWER when none came in time; head: for one that reads hidden states."""

    def close(self) -> None:
        """Tell the drafter that the request has ended."""


@dataclass(frozen=True, kw_only=True)
class DraftModelConfig(MethodConfig):
    """draft_len: tokens proposed (γ)."""

    draft_len: int = whole(3, 1, MAX_NODES)


class DraftModel(Proposer):
    """A draft language model that proposes a chain in one call."""

    name = "draft_model"
    want = Want()

    def __init__(self, config: DraftModelConfig, line: DraftLine) -> None:
        self._line = line
        self._draft_len = config.draft_len

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return the draft model's chain of at most draft_len tokens."""
        length = budget.clipped(self._draft_len)
        if not length:
            return Proposal.none()
        drafted = self._line.propose(context, sampling, Budget(length, length))
        return Proposal(drafted.tree, (self.name,) * drafted.tree.num_nodes, drafted.q)

    def close(self) -> None:
        """End the drafter's sequence."""
        self._line.close()
