"""Several proposers in one tree under one node budget: common paths are shared, others become branches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pydantic import Field

from orchestrator.core.context import Context
from orchestrator.core.proposal import Budget, NativeDrafts, Proposal, Proposer, Step
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import MAX_NODES, TreeBuilder
from orchestrator.core.types import Acceptance, HiddenStates, StepOptions
from orchestrator.drafting.parameters import MethodConfig


class UnionConfig(MethodConfig):
    """max_nodes: maximum draft nodes of all members together; a member's own max_nodes limits its share."""

    max_nodes: int = Field(24, ge=0, le=MAX_NODES)


class Union(Proposer):
    """Calls its members in turn; each may use an equal share of the nodes that the members before it left.

    caps: maximum nodes of each member, its own max_nodes.
    Invariant: the tree holds each member's nodes within its share, a common path once; siblings are tried in the order
    of the members. The source of a node joins the names of all members that proposed it. The drafts count as
    deterministic: in a merged tree, a token that a member sampled from q is no longer distributed as q.
    """

    def __init__(self, members: Sequence[Proposer], caps: Sequence[int]) -> None:
        self.name = "+".join(member.name for member in members)
        self._members = members
        self._caps = caps
        self._budget, self._are_plain = Budget(0, 0), [False] * len(members)

    @property
    def native_drafts(self) -> NativeDrafts | None:
        """What makes the next trees in native code, if it can draft for every member, and at most one has a drafter.

        Members that do not draft now are left out.
        """
        members, max_nodes = list[NativeDrafts](), self._budget.max_nodes
        for member, cap, is_plain in zip(self._members, self._caps, self._are_plain, strict=True):
            if is_plain:
                continue
            if (drafts := member.native_drafts) is None:
                return None
            members.append(drafts._replace(max_nodes=min(max_nodes, cap)))
        if not members or sum(not each.handle for each in members) > 1:
            return None
        return NativeDrafts(None, max_nodes, self._budget.max_depth, (), options=self.needs, members=tuple(members))

    @property
    def needs(self) -> StepOptions:
        """What any of the members needs from the step."""
        needs = StepOptions()
        for member in self._members:
            needs = needs.merged(member.needs)
        return needs

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return the members' trees, merged."""
        tree, sources, num_plain, self._budget = TreeBuilder(), list[str](), list[int](), budget
        for place, (member, cap) in enumerate(zip(self._members, self._caps, strict=True)):
            share = -(-(budget.max_nodes - tree.num_nodes) // (len(self._members) - place))
            member_budget = Budget(min(share, cap), budget.max_depth)
            drafted = member.propose(context, sampling, member_budget).cut(member_budget)
            num_plain.append(drafted.num_plain)
            merge(tree, sources, drafted)
        self._are_plain = [count > 0 for count in num_plain]
        return Proposal(tree.build(), tuple(sources)) if tree.num_nodes else Proposal.plain(min(num_plain))

    def observe(self, steps: Sequence[Step]) -> None:
        """Give each member the hidden states that it reads; members do not learn from the merged tree."""
        states = self.needs.hidden_states
        for member in self._members:
            wanted = member.needs.hidden_states
            member.observe([each._replace(acceptance=_with_states(each.acceptance, states, wanted)) for each in steps])

    def close(self) -> None:
        """Free what the members hold."""
        for member in self._members:
            member.close()


def merge(tree: TreeBuilder, sources: list[str], proposal: Proposal) -> None:
    """Add a proposal's nodes to the tree.

    sources: of the tree's nodes 1…k; a node that exists already gets another source.
    """
    nodes = [0]
    edges = zip(proposal.tree.parents.tolist(), proposal.tree.tokens.tolist(), proposal.sources, strict=True)
    for parent, token, source in edges:
        node = tree.add(nodes[parent], token)
        if node > len(sources):
            sources.append(source)
        else:
            sources[node - 1] += f"+{source}"
        nodes.append(node)


def _with_states(acceptance: Acceptance, states: HiddenStates, wanted: HiddenStates) -> Acceptance:
    """Return the acceptance with the features of the wanted states only; states: those that its features hold."""
    features = acceptance.features
    if features is None or states == wanted or states != HiddenStates.LAST | HiddenStates.LAYERS:
        return acceptance
    width = features.shape[1] // 4
    return replace(acceptance, features=features[:, :width] if wanted == HiddenStates.LAST else features[:, width:])
