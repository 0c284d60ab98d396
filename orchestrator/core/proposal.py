"""What the loop and a drafting method exchange: the budget of a proposal, the proposal, and the proposer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from orchestrator.core.arrays import IdArray
from orchestrator.core.context import Context
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, Distribution, StepOptions

#: Bits of a node's names that belong to each member of a union (`drafts::kNameBits`).
NAME_BITS = 8


@dataclass(frozen=True)
class Budget:
    """The maximum number of draft nodes in a proposal, the root not counted, and of levels below the root."""

    max_nodes: int
    max_depth: int

    def within(self, other: Budget) -> Budget:
        """Return the budget that is within both limits."""
        return Budget(min(self.max_nodes, other.max_nodes), min(self.max_depth, other.max_depth))

    def clipped(self, length: int) -> int:
        """Return the length of the longest chain of at most `length` nodes that fits."""
        return max(0, min(length, self.max_nodes, self.max_depth))


@dataclass(frozen=True, eq=False)
class Proposal:
    """A draft tree; a bare root means that the proposer drafts nothing.

    sources: for each node 1…m, the name of what proposed it, for the statistics.
    q: for each node 1…m, the distribution from which it was sampled; empty for deterministic drafts.
    num_plain: of a bare root, how many steps may run together without a draft, this one included; 0 = only this one.
    """

    tree: TokenTree
    sources: tuple[str, ...]
    q: tuple[Distribution, ...] = ()
    num_plain: int = 0

    @classmethod
    def empty(cls) -> Proposal:
        """Return the proposal without a draft."""
        return _EMPTY

    @classmethod
    def plain(cls, num_steps: int = sys.maxsize) -> Proposal:
        """Return the proposal that so many steps run without a draft."""
        return cls(TokenTree.bare(), (), num_plain=num_steps)

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
    """A completed step.

    draft_s: seconds to propose. target_s: seconds from the call of the target to its answer. is_native: native code has
    drafted after it, and has therefore read its tokens.
    """

    proposal: Proposal
    acceptance: Acceptance
    draft_s: float
    target_s: float
    is_native: bool = False

    @property
    def tokens(self) -> list[int]:
        """Return the tokens that the step commits."""
        return self.acceptance.tokens(self.proposal.tree)


class NativeDrafts(NamedTuple):
    """What an engine needs to draft for a request in native code, without calling its proposer.

    max_nodes, max_depth: limits of a tree. sources: by the numbers that native code gives to the sources of nodes.
    owner: a native proposer, with its `handle`; or, without one, a drafter in the engine's process
    (`orchestrator.core.messages.drafter.DrafterUse`).
    is_sized: its trees are only as large as pays, so that a pass need not have room for max_nodes.
    options: what the proposer needs from a step after which native code cannot draft.
    members: of a union, in their order, each with the limits of its own tree; the union itself has no owner or sources.
    """

    owner: object
    max_nodes: int
    max_depth: int
    sources: tuple[str, ...]
    handle: int = 0
    is_sized: bool = False
    options: StepOptions = StepOptions()
    members: tuple[NativeDrafts, ...] = ()

    @property
    def members_or_self(self) -> tuple[NativeDrafts, ...]:
        """The methods that draft: the members of a union, or the one method."""
        return self.members or (self,)

    def source_of(self, names: int) -> str:
        """Return a node's source. names: NAME_BITS for each method: 0, or 1 + the number of its source of the node."""
        numbers = [names >> place & (1 << NAME_BITS) - 1 for place in range(0, 32, NAME_BITS)]
        return "+".join(
            member.sources[number - 1] for member, number in zip(self.members_or_self, numbers, strict=False) if number
        )


class Proposer(Protocol):
    """Drafts for one request; a subclass must define `name` and `propose`, and overrides what else it needs."""

    name: str

    @property
    def native_drafts(self) -> NativeDrafts | None:
        """What makes the next proposals in native code; None: `propose` must be called for each."""
        return None

    @property
    def needs(self) -> StepOptions:
        """What the proposer needs from the step that verifies its last proposal."""
        return StepOptions()

    def begin(self, context: Context, sampling: Sampling, budget: Budget) -> None:
        """Begin slow work for a `propose` call with the same arguments, so that other proposers can begin meanwhile."""
        return

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return a tree below the context's root, within the budget; a bare root is legal."""

    def observe(self, steps: Sequence[Step]) -> None:
        """Learn from the steps since the last proposal, whose tokens the context already has."""
        return

    def close(self) -> None:
        """Free what the proposer holds for this request."""
        return
