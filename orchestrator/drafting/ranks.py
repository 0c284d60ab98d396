"""How likely the nodes of any method's trees are, from their depth and their rank among their siblings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orchestrator.core.arrays import FloatArray, IdArray
from orchestrator.core.cost_model import CostModel
from orchestrator.core.tree import TokenTree
from orchestrator.drafting.estimates import AcceptanceEstimates

#: The probability of a node before any outcome: optimistic, so that drafts are tried.
PRIOR = 0.8
#: Stands in the place of a rank where all nodes of a level count together.
LEVEL = "level"


class RankEstimates:
    """The probabilities of the nodes of one kind of drafts. kind: what distinguishes them from others in the counts."""

    def __init__(self, estimates: AcceptanceEstimates, *kind: str | int) -> None:
        self._estimates, self._kind = estimates, kind

    def probability(self, depth: int, rank: int) -> float:
        """Return the probability that a node matches the text if its parent does."""
        return self._estimates.probability((*self._kind, depth, rank), PRIOR if rank == 0 else PRIOR / 4)

    def level_probability(self, depth: int) -> float:
        """Return the probability that some node of a level matches the text if the path above does: the papers' α."""
        return self._estimates.probability((*self._kind, depth, LEVEL), PRIOR)

    def probabilities(self, tree: TokenTree) -> list[float]:
        """Return for the nodes 1…m the probability that each matches the text if its parent does."""
        return [self.probability(depth, rank) for depth, rank in zip(tree.depths[1:].tolist(), tree.ranks, strict=True)]

    def path_probabilities(self, tree: TokenTree) -> FloatArray:
        """Return for the nodes 1…m the probability that all nodes of their paths are accepted, (m,) float64.

        Invariant: no probability is higher than an earlier sibling's, so that the first of sampled siblings are kept.
        """
        paths, before = [1.0], dict[int, float]()
        for parent, probability in zip(tree.parents.tolist(), self.probabilities(tree), strict=True):
            before[parent] = min(probability, before.get(parent, 1.0))
            paths.append(paths[parent] * before[parent])
        return np.array(paths[1:])

    def learn(self, tree: TokenTree, tokens: Sequence[int]) -> int:
        """Count the outcomes of all children and levels along the text's path through the draft; return its length."""
        node = 0
        for depth, token in enumerate(tokens, start=1):
            children = tree.children[node]
            for rank, candidate in enumerate(children):
                self._estimates.observe((*self._kind, depth, rank), candidate == token)
            if children:
                self._estimates.observe((*self._kind, depth, LEVEL), token in children)
            if token not in children:
                return depth - 1
            node = children[token]
        return len(tokens)


def paying(probabilities: FloatArray, costs: CostModel, draft_s: float) -> IdArray:
    """Return those of the nodes 1…m that give the highest rate, (k,) int32, ascending.

    probabilities: (m,) float64, of the whole paths; no node's is higher than its parent's. draft_s: time already spent
    on drafting.
    Invariant: a node is returned only with its parent, and there are no more nodes than have costs.
    """
    # Among equal probabilities, the stable order has the parent first.
    order = np.argsort(-probabilities, kind="stable")[: len(costs.seconds) - 1]
    tokens = 1.0 + costs.others_tokens + np.concatenate([[0.0], probabilities[order].cumsum()])
    gains = tokens - costs.rate_to_beat * (costs.seconds[: len(tokens)] - costs.seconds[0])
    rates = tokens / (costs.seconds[: len(tokens)] + draft_s)
    best = int(rates.argmax()) if gains.max() > gains[0] else 0
    return np.sort(order[:best]).astype(np.int32) + 1


def paying_in_turn(tree: TokenTree, probabilities: FloatArray, costs: CostModel, draft_s: float) -> IdArray:
    """Return the nodes of a sampled tree that each pay for themselves after those kept before, (k,) int32, ascending.

    probabilities: as for `paying`. draft_s: the time to draft, as expected before any token was sampled.
    Invariant: a node is returned only with its parent and its earlier siblings, and whether it is returned depends only
    on the nodes before it, which exist whatever its token is. If the likelier nodes were judged first, a node that
    exists only because of another node's token could be judged before that node (docs/losslessness.md, Trees that are
    sampled while they grow).
    """
    kept, closed = [0], set[int]()  # closed: nodes below which no more nodes are kept
    seconds, tokens = costs.seconds.tolist(), 1.0 + costs.others_tokens
    nodes = zip(tree.parents.tolist(), probabilities.tolist(), strict=True)
    for node, (parent, probability) in enumerate(nodes, start=1):
        now_s, next_s = seconds[len(kept) - 1], seconds[min(len(kept), len(seconds) - 1)]
        is_worth_row = probability > costs.rate_to_beat * (next_s - now_s)
        is_faster = (tokens + probability) * (now_s + draft_s) >= tokens * (next_s + draft_s)
        if parent in closed or not (is_worth_row and is_faster):
            closed |= {parent, node}
            continue
        kept.append(node)
        tokens += probability
    return np.array(kept[1:], np.int32)
