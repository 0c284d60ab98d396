"""How likely a node or a level of a draft must seem, so that it pays for what it costs."""

from __future__ import annotations

from typing import NamedTuple

from orchestrator.core.cost_model import CostModel

#: Factors on the prices of a row and of a level. Prices are those of plain decoding, and a draft that pays raises them;
#: and about two thirds of the levels that the text reaches have a node that it goes on with. Both were chosen on
#: replayed drafts (docs/performance.md, What a draft should be sure of).
ROW_FACTOR, LEVEL_FACTOR = 1.3, 2.0
#: No threshold for a node is outside these: a price of 0 would fill trees with nodes that are never accepted, and one
#: of 1 would keep even sure nodes out, so that nothing would be learnt of the time that a level takes.
LEAST, MOST = 0.01, 0.9


class Thresholds(NamedTuple):
    """The least probabilities of the nodes and levels of a draft, as in `HeadInput`."""

    min_prob: float
    min_reach: float


def paying_thresholds(costs: CostModel, level_s: float, most_nodes: int) -> Thresholds:
    """Return the thresholds from which nodes and levels pay.

    level_s: seconds to draft a level. most_nodes: maximum nodes of the draft, at least 1; a row costs the mean over so
    many, since costs rise in stairs, and each measured size has an error of its own.
    A node is worth its probability in tokens, and a row costs the tokens that would otherwise be decoded in its time.
    A level is worth no more than the probability that the text reaches it, and costs its time and at least one row.
    """
    most_nodes = min(most_nodes, len(costs.seconds) - 1)
    row_s = float(costs.seconds[most_nodes] - costs.seconds[0]) / most_nodes
    row, level = costs.rate_to_beat * row_s, costs.rate_to_beat * level_s
    min_prob = min(max(ROW_FACTOR * row, LEAST), MOST)
    return Thresholds(min_prob, min(min_prob + LEVEL_FACTOR * level, 1.0))
