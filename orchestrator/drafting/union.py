"""Several proposers in one tree under one node budget: common paths are shared, others become branches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from pydantic import Field

from orchestrator.core.arrays import FloatArray
from orchestrator.core.context import Context
from orchestrator.core.proposal import Budget, NativeDrafts, Proposal, Proposer, Step
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import MAX_NODES, TokenTree, TreeBuilder
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
        self._budget = Budget(0, 0)

    @property
    def native_drafts(self) -> NativeDrafts | None:
        """What makes the next trees in native code, if it can draft for every member, and at most one has a drafter."""
        members, max_nodes = list[NativeDrafts](), self._budget.max_nodes
        for member, cap in zip(self._members, self._caps, strict=True):
            if (drafts := member.native_drafts) is None:
                return None
            members.append(drafts._replace(max_nodes=min(max_nodes, cap)))
        if sum(not each.handle for each in members) > 1:
            return None
        return NativeDrafts(None, max_nodes, self._budget.max_depth, (), options=self.options, members=tuple(members))

    @property
    def options(self) -> StepOptions:
        """What any of the members needs from the step."""
        options = StepOptions()
        for member in self._members:
            options = options.merged(member.options)
        return options

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return the members' trees, merged."""
        tree, sources, self._budget = TreeBuilder(), list[str](), budget
        for place, (member, cap) in enumerate(zip(self._members, self._caps, strict=True)):
            share = -(-(budget.max_nodes - tree.num_nodes) // (len(self._members) - place))
            member_budget = Budget(min(share, cap), budget.max_depth)
            merge(tree, sources, member.propose(context, sampling, member_budget).cut(member_budget))
        return Proposal(tree.build(), tuple(sources))

    def observe(self, tree: TokenTree, acceptance: Acceptance) -> None:
        """Give each member the hidden states that it reads; members do not learn from the merged tree."""
        states = self.options.hidden_states
        for member in self._members:
            member.observe(tree, _with_states(acceptance, states, member.options.hidden_states))

    def observe_native(self, steps: Sequence[Step]) -> None:
        """Let each member note what native code has read for it."""
        for member in self._members:
            member.observe_native(steps)

    def close(self) -> None:
        """Free what the members hold."""
        for member in self._members:
            member.close()


def united(
    grown: Proposal, probabilities: FloatArray, drafted: Proposal, drafted_probabilities: Sequence[float]
) -> tuple[Proposal, FloatArray]:
    """Return both trees merged, the nodes of `grown` first, and the probabilities of all paths, (k,) float64.

    probabilities: (m,) float64, of the paths of `grown`. drafted_probabilities: of each node of `drafted`, given its
    parent. A token added beside others gets its part of the probability that they leave. No path is likelier than the
    one to its parent.
    """
    tree, sources, paths = TreeBuilder(), list[str](), [1.0, *probabilities.tolist()]
    merge(tree, sources, grown)
    rest = [1.0] * len(paths)  # for each node, the probability that its children leave
    for node, parent in enumerate(grown.tree.parents.tolist(), start=1):
        rest[parent] = max(rest[parent] - paths[node] / paths[parent], 0.0)
    nodes = merge(tree, sources, drafted)
    for parent, node, probability in zip(drafted.tree.parents.tolist(), nodes[1:], drafted_probabilities, strict=True):
        above = nodes[parent]
        if node == len(paths):
            paths.append(paths[above] * probability * (rest[above] if above < len(rest) else 1.0))
        else:
            paths[node] = max(paths[node], paths[above] * probability)
    return Proposal(tree.build(), tuple(sources)), np.array(paths[1:])


def merge(tree: TreeBuilder, sources: list[str], proposal: Proposal) -> list[int]:
    """Add a proposal's nodes to the tree; return the node of the tree that each of its nodes 0…m has become.

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
    return nodes


def _with_states(acceptance: Acceptance, states: HiddenStates, wanted: HiddenStates) -> Acceptance:
    """Return the acceptance with the features of the wanted states only; states: those that its features hold."""
    features = acceptance.features
    if features is None or states == wanted or states != HiddenStates.LAST | HiddenStates.LAYERS:
        return acceptance
    width = features.shape[1] // 4
    return replace(acceptance, features=features[:, :width] if wanted == HiddenStates.LAST else features[:, width:])
