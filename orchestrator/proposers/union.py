"""Several proposers in one tree under one node budget: what they agree on is one node, what they differ in stands side
by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from orchestrator.core.context import Context
from orchestrator.core.proposal import Budget, Proposal, Proposer
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import MAX_NODES, TokenTree
from orchestrator.core.types import Acceptance, HiddenStates, StepOptions
from orchestrator.proposers.parameters import MethodConfig, whole


@dataclass(frozen=True, kw_only=True)
class UnionConfig(MethodConfig):
    """max_nodes: of all members together; a member's own max_nodes bounds its share of them."""

    max_nodes: int = whole(24, 0, MAX_NODES)


class Union(Proposer):
    """Asks its members in turn; each may fill its equal share of what the ones before it have left of the budget.

    caps: most nodes of each member, its own max_nodes.

    Invariant: the tree holds each member's nodes as far as its share goes, a common path once; siblings are tried in the
    order of the members. A node that several proposed has all their names as its source. Its drafts are *chosen*:
    what a member has drawn from q is as good a guess as any, once it stands among others'.
    """

    def __init__(self, members: Sequence[Proposer], caps: Sequence[int]) -> None:
        self.name = "+".join(member.name for member in members)
        self._members = members
        self._caps = caps

    @property
    def options(self) -> StepOptions:
        """What any of the members wants."""
        options = StepOptions()
        for member in self._members:
            options = options.merged(member.options)
        return options

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return the members' trees in one."""
        merged = _Merged()
        for place, (member, cap) in enumerate(zip(self._members, self._caps, strict=True)):
            share = -(-(budget.max_nodes - merged.num_nodes) // (len(self._members) - place))
            asked = Budget(min(share, cap), budget.max_depth)
            merged.add(member.propose(context, sampling, asked).cut(asked))
        return merged.proposal()

    def observe(self, tree: TokenTree, acceptance: Acceptance) -> None:
        """Give each member the hidden states that it reads; the tree is not one's own, so nobody learns from it."""
        kept = self.options.hidden_states
        for member in self._members:
            member.observe(tree, _with_states(acceptance, kept, member.options.hidden_states))

    def close(self) -> None:
        """Free what the members hold."""
        for member in self._members:
            member.close()


class _Merged:
    """A tree that grows by other trees. nodes: (parent, token) → node."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], int] = {}
        self._sources: list[str] = []

    @property
    def num_nodes(self) -> int:
        """Nodes so far."""
        return len(self._nodes)

    def add(self, proposal: Proposal) -> None:
        """Add a proposal's nodes; those that are there already gain a source."""
        place = [0]
        edges = zip(proposal.tree.parents.tolist(), proposal.tree.tokens.tolist(), proposal.sources, strict=True)
        for parent, token, source in edges:
            edge = (place[parent], token)
            if edge in self._nodes:
                self._sources[self._nodes[edge] - 1] += f"+{source}"
            else:
                self._nodes[edge] = len(self._nodes) + 1
                self._sources.append(source)
            place.append(self._nodes[edge])

    def proposal(self) -> Proposal:
        """Return what has been put together."""
        edges = np.array(list(self._nodes), np.int32).reshape(-1, 2)
        return Proposal(TokenTree(edges[:, 1].copy(), edges[:, 0].copy()), tuple(self._sources))


def _with_states(acceptance: Acceptance, kept: HiddenStates, wanted: HiddenStates) -> Acceptance:
    """Return the acceptance with the columns of its features that are wanted; kept: which states they hold."""
    features = acceptance.features
    if features is None or kept == wanted or kept != HiddenStates.LAST | HiddenStates.LAYERS:
        return acceptance
    width = features.shape[1] // 4
    return replace(acceptance, features=features[:, :width] if wanted == HiddenStates.LAST else features[:, width:])
