"""Grows the trees of all requests that share a pass together, the likeliest node of all of them first.

It is the reference for `native/drafts/joint_growth.h`, and grows the tree of a single request where that cannot
be compiled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import Protocol

import numpy as np

from orchestrator.core.cost_model import CostModel, Curve, least_slopes

#: Trees are sent only if they promise this fraction more tokens per second than plain steps.
MARGIN = 0.02


class GrowingTree(Protocol):
    """The tree of one request while it grows."""

    @property
    def likeliest(self) -> float:
        """The probability of the likeliest node that may be added; 0 if there is none, or no room for it."""

    def add(self) -> None:
        """Add that node; none that may be added later is likelier."""


def grow_jointly(trees: Sequence[GrowingTree], context_row_s: Sequence[float], costs: CostModel) -> list[int]:
    """Let trees grow, and return how many nodes of each are worth sending: its first ones.

    context_row_s: seconds that the context of each tree adds to each of its nodes. costs: of the pass, by the nodes of
    all trees and without context_row_s.
    Invariant: no larger or smaller trees of these candidates have a higher rate if all contexts add the same; else none
    that take the nodes in the same order do. If no node is worth more than the highest rate so far × the least cost of
    another row, neither it nor any later one can raise the rate.
    Source: one cut through the nodes of all requests, TETRIS (arXiv:2502.15197).
    """
    rate = plain_rate = (1.0 + MARGIN) * costs.rate_to_beat
    seconds, row_s, contexts_s = costs.seconds.tolist(), costs.row_s.tolist(), 0.0
    tokens, added, num_best = 1.0 + costs.others_tokens, list[int](), 0

    def minus_worth(number: int) -> float:
        return plain_rate * context_row_s[number] - trees[number].likeliest

    heap = [(minus_worth(number), number) for number in range(len(trees))]
    heapify(heap)
    while heap and len(added) + 1 < len(seconds) and -heap[0][0] > rate * row_s[len(added)]:
        number = heap[0][1]
        tokens += trees[number].likeliest
        contexts_s += context_row_s[number]
        trees[number].add()
        added.append(number)
        if tokens > rate * (pass_s := seconds[len(added)] + contexts_s):
            rate, num_best = tokens / pass_s, len(added)
        heapreplace(heap, (minus_worth(number), number))
    sent = Counter(added[:num_best])
    return [sent[number] for number in range(len(trees))]


def joint_costs(
    curve: Curve, contexts_s: float, num_requests: int, num_rows: int, tokens: float, num_nodes: int
) -> CostModel:
    """Return the costs of a pass by the nodes of the trees that grow together, up to num_nodes.

    contexts_s: what the contexts add. num_requests: all of the pass. num_rows: its rows without these trees. tokens:
    those that it is expected to give without these trees.
    """
    seconds = curve.at(np.arange(num_rows, num_rows + num_nodes + 1.0)) + contexts_s
    plain_s = float(curve.at(np.array(float(num_requests)))) + contexts_s
    rate_to_beat = max(num_requests / plain_s, tokens / float(seconds[0]))
    return CostModel(seconds, least_slopes(seconds), tokens - 1.0, rate_to_beat)
