"""What the loop and a drafting method exchange: the budget of a proposal, the proposal, and the proposer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from orchestrator.core.context import Context
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.surfaces import Surface
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, Distribution, IdArray, StepOptions


@dataclass(frozen=True)
class Budget:
    """Most draft nodes of a proposal, the root not counted, and most levels below the root."""

    max_nodes: int
    max_depth: int

    def within(self, other: Budget) -> Budget:
        """Return the budget that keeps to both."""
        return Budget(min(self.max_nodes, other.max_nodes), min(self.max_depth, other.max_depth))

    def clipped(self, length: int) -> int:
        """Return the length of a chain of at most `length` nodes that fits."""
        return max(0, min(length, self.max_nodes, self.max_depth))


@dataclass(frozen=True, eq=False)
class Proposal:
    """A draft tree; a bare root means that the proposer drafts nothing.

    sources: the names of what proposed the nodes 1…m, for the statistics.
    q: the distribution from which each of the nodes 1…m was sampled; empty for deterministic drafts.
    """

    tree: TokenTree
    sources: tuple[str, ...]
    q: tuple[Distribution, ...] = ()

    @classmethod
    def empty(cls) -> Proposal:
        """Return the proposal without a draft."""
        return _EMPTY

    @classmethod
    def of(cls, tree: TokenTree, source: str) -> Proposal:
        """Return the proposal of a tree from one source."""
        return cls(tree, (source,) * tree.num_nodes)

    @classmethod
    def chain(cls, tokens: Sequence[int], source: str) -> Proposal:
        """Return the proposal of a chain."""
        return cls.of(TokenTree.chain(tokens), source)

    def cut(self, budget: Budget) -> Proposal:
        """Return the proposal without the nodes that exceed the budget."""
        if self.tree.num_nodes <= min(budget.max_nodes, budget.max_depth):  # no tree is deeper than it has nodes
            return self
        return self.only(self.tree.within(budget.max_nodes, budget.max_depth))

    def only(self, kept: IdArray) -> Proposal:
        """Return the proposal of these nodes only.

        kept: (k,) int32, ascending; the parent of each is the root or one of them.
        """
        if len(kept) == self.tree.num_nodes:
            return self
        places = (kept - 1).tolist()
        return Proposal(
            self.tree.only(kept),
            tuple(self.sources[place] for place in places),
            tuple(self.q[place] for place in places) if self.q else (),
        )


_EMPTY = Proposal(TokenTree.bare(), ())


class Step(NamedTuple):
    """A step that was made. draft_s: time to propose. target_s: time from the call of the target to its answer."""

    proposal: Proposal
    acceptance: Acceptance
    draft_s: float
    target_s: float

    @property
    def tokens(self) -> list[int]:
        """Return the tokens that the step commits."""
        return self.acceptance.tokens(self.proposal.tree)


class CompiledDrafts(NamedTuple):
    """What an engine needs to draft for a request in native code, step by step without its proposer.

    handle, next_address: the compiled proposer, which `owner` keeps alive, and the address of its function
    (`drafts::Next`). max_nodes, max_depth: of a tree. sources: by the bits of a node's names. costs: by which trees are
    sized, if they are; drafting takes microseconds, which have no price.
    """

    handle: int
    next_address: int
    owner: object
    max_nodes: int
    max_depth: int
    sources: tuple[str, ...]
    costs: Surface | None = None


class Proposer(Protocol):
    """Drafts for one request; a subclass must define `name` and `propose`, and overrides what else it needs."""

    name: str

    @property
    def num_plain(self) -> int:
        """Return how many proposals, the last one included, are bare roots whatever the text: none need be made."""
        return 0

    @property
    def compiled(self) -> CompiledDrafts | None:
        """What makes the proposals behind the last one in native code; None: it must be asked for each."""
        return None

    @property
    def options(self) -> StepOptions:
        """What it needs from the step that verifies its last proposal."""
        return StepOptions()

    def begin(self, context: Context, sampling: Sampling, budget: Budget) -> None:
        """Begin what takes long, before `propose` is called with the same arguments: others may begin meanwhile."""
        return

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return a tree below the context's root, within the budget; a bare root is legal."""

    def observe(self, tree: TokenTree, acceptance: Acceptance) -> None:
        """Learn from the decision on the last proposal; the context has the committed tokens."""
        return

    def observe_compiled(self, steps: Sequence[Step]) -> None:
        """Learn from steps that were made with `compiled`, whose compiled proposer has learnt already."""
        return

    def close(self) -> None:
        """Free what the proposer holds for this request."""
        return
