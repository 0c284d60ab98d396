"""Between the loop and a drafting method: what a proposal may cost, the proposal, and who makes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from orchestrator.core.context import Context
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, Distribution, IdArray, StepOptions


@dataclass(frozen=True)
class Budget:
    """What a proposal may cost: draft nodes (root not counted) and levels below the root."""

    max_nodes: int
    max_depth: int

    def clipped(self, length: int) -> int:
        """Return the length of a chain of at most `length` nodes that fits."""
        return max(0, min(length, self.max_nodes, self.max_depth))


@dataclass(frozen=True, eq=False)
class Proposal:
    """A proposer's answer; a bare root means "no idea".

    sources: what made each of the nodes 1…m, for the statistics.
    q: for drawn drafts, the distribution that each of the nodes 1…m was drawn from; empty for chosen ones.
    """

    tree: TokenTree
    sources: tuple[str, ...]
    q: tuple[Distribution, ...] = ()

    @classmethod
    def none(cls) -> Proposal:
        """Return the proposal without a draft."""
        return cls(TokenTree.bare(), ())

    @classmethod
    def of(cls, tree: TokenTree, source: str) -> Proposal:
        """Return the proposal of a tree that one source made."""
        return cls(tree, (source,) * tree.num_nodes)

    @classmethod
    def chain(cls, tokens: Sequence[int], source: str) -> Proposal:
        """Return the proposal of one continuation."""
        return cls.of(TokenTree.chain(tokens), source)

    def cut(self, budget: Budget) -> Proposal:
        """Return the proposal without the nodes that the budget does not cover."""
        return self.only(self.tree.within(budget.max_nodes, budget.max_depth))

    def only(self, kept: IdArray) -> Proposal:
        """Return the proposal of these nodes alone, (k,) int32 ascending, the parent of each among them or the root."""
        if len(kept) == self.tree.num_nodes:
            return self
        drawn_from = tuple(self.q[node - 1] for node in kept) if self.q else ()
        return Proposal(self.tree.only(kept), tuple(self.sources[node - 1] for node in kept), drawn_from)


class Proposer(Protocol):
    """A drafting method at work for one request; a subclass that learns or holds nothing need not say so."""

    name: str

    @property
    def options(self) -> StepOptions:
        """What it asks of the step that verifies its last proposal."""
        return StepOptions()

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return a tree below the context's root, within the budget; a bare root is legal."""

    def observe(self, tree: TokenTree, acceptance: Acceptance) -> None:
        """Learn what the target made of the last proposal; the context itself says what was committed."""
        return

    def close(self) -> None:
        """Free what is held for this request."""
        return
