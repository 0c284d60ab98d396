"""Costs of a pass by its rows and KV tokens: curves through measurements, and the cost models that size drafts."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from orchestrator.core.arrays import FloatArray
from orchestrator.core.tree import MAX_NODES

#: A row that has not been measured is taken to cost this fraction of a plain step. It is optimistic, so that larger
#: trees are tried, and thereby measured, wherever they might pay.
UNKNOWN_ROW = 0.02
#: An additional row is never taken to cost less than this fraction of a plain step.
MIN_ROW = 0.001
#: Contexts whose lengths fall into the same range of this many tokens share a cost model.
CONTEXT_STEP = 64
#: A plain step that runs together with others takes at least this fraction of the time of one that runs alone.
MIN_SHARE_OF_SINGLE = 0.5
#: The least weight of a group, in measurements, however old they are.
MIN_WORTH = 1e-6
#: No point of a line costs less than this fraction of the mean.
MIN_SHARE_OF_MEAN = 0.1
#: A line is fitted as if a measurement PRIOR_ROWS away from all others, with weight PRIOR_WORTH, had shown UNKNOWN_ROW.
PRIOR_ROWS, PRIOR_WORTH = 8.0, 0.5


class Curve(NamedTuple):
    """Costs that are linear between points, and beyond the last one.

    rows: (n,) float64, increasing. seconds: (n,) float64, non-decreasing. row_s: seconds per row beyond the last.
    """

    rows: FloatArray
    seconds: FloatArray
    row_s: float

    @classmethod
    def measured(cls, rows: list[int], seconds: list[float]) -> Curve:
        """Return the curve through equally weighted measurements; rows: increasing, at least two."""
        points_s = rising(np.array(seconds), np.ones(len(seconds)))
        numbers = np.array(rows, np.float64)
        row_s = float((points_s[-1] - points_s[0]) / (numbers[-1] - numbers[0]))
        return cls(numbers, points_s, max(row_s, MIN_ROW * float(points_s[0])))

    def at(self, rows: FloatArray) -> FloatArray:
        """Return the costs of passes with these numbers of rows, float64 of the same shape."""
        beyond = np.maximum(rows - self.rows[-1], 0.0)
        costs: FloatArray = np.interp(rows, self.rows, self.seconds) + self.row_s * beyond
        return costs


class PassCosts(NamedTuple):
    """What passes cost: a curve over their rows, and what the contexts that the rows attend to add to it.

    curve: seconds of rows without a context. token_s: seconds per token of a context, however many rows attend to it.
    row_token_s: seconds per token and row that attends to it.
    """

    curve: Curve
    token_s: float = 0.0
    row_token_s: float = 0.0

    def kv_s(self, num_kv_tokens: float, num_row_kv_tokens: float) -> float:
        """Return what the contexts of a pass add; num_row_kv_tokens: tokens times the rows that attend to them."""
        return self.token_s * num_kv_tokens + self.row_token_s * num_row_kv_tokens

    def times(self, factor: float) -> PassCosts:
        """Return the costs of a machine that takes `factor` times as long."""
        curve = Curve(self.curve.rows, factor * self.curve.seconds, factor * self.curve.row_s)
        return PassCosts(curve, factor * self.token_s, factor * self.row_token_s)


#: The assumed costs of passes where nothing has been measured, in plain passes.
UNKNOWN = PassCosts(Curve(np.array([1.0]), np.array([1.0]), UNKNOWN_ROW))


class SharedCosts(NamedTuple):
    """What sizes the trees of requests that grow together for a pass.

    curve: seconds by the rows of all requests, without their contexts. root_s, node_s: what this request's context adds
    for its root, and for each node. mean_tokens: those that a request has recently got from a pass.
    """

    curve: Curve
    root_s: float
    node_s: float
    mean_tokens: float


class CostModel(NamedTuple):
    """What one request's rows cost in the next pass, beside those of the other requests.

    seconds: (N,) float64, non-decreasing; index n: time of the pass if the request has n + 1 rows.
    row_s: (N,) float64; index n: the lowest mean cost of the rows beyond n + 1, over all larger numbers of rows.
    others_tokens: the tokens that the other requests are expected to get from the pass.
    rate_to_beat: tokens of the batch per second that a draft has to beat: those without a draft of this request, or
    those without any draft if they are more. If they were the former alone, requests that all draft under load would
    each find their own draft worthwhile.
    shared: for a pass in which the trees of all requests grow together; None if unknown.
    """

    seconds: FloatArray
    row_s: FloatArray
    others_tokens: float
    rate_to_beat: float
    shared: SharedCosts | None = None

    @property
    def plain_s(self) -> float:
        """Time of a plain step that is one of several run together."""
        return (1.0 + self.others_tokens) / self.rate_to_beat


class Batch(NamedTuple):
    """What recent passes held, on average.

    others: other requests besides this one. rows, tokens: what a request puts into a pass and gets out of it.
    num_kv_tokens: tokens of all contexts.
    """

    others: float
    rows: float
    tokens: float
    num_kv_tokens: float


class CostModels:
    """The cost models of one moment, by the length of a request's context.

    single_s: extra seconds of a plain step run alone, compared with one of several run together.
    """

    def __init__(self, costs: PassCosts, batch: Batch, single_s: float) -> None:
        self._costs, self._batch, self._single_s = costs, batch, single_s
        self._known: dict[int, CostModel] = {}

    def at(self, num_kv_tokens: int) -> CostModel:
        """Return the cost model of a request whose context has this many tokens."""
        number = num_kv_tokens // CONTEXT_STEP if self._costs.token_s or self._costs.row_token_s else 0
        if (costs := self._known.get(number)) is None:
            costs = self._known[number] = self._computed(number * CONTEXT_STEP)
        return costs

    @cached_property
    def _rows_s(self) -> FloatArray:
        """Seconds of passes in which this request has 1…N rows, without the contexts."""
        others = self._batch.others * self._batch.rows
        return self._costs.curve.at(np.arange(1.0, MAX_NODES + 2) + others)

    @cached_property
    def _row_s(self) -> FloatArray:
        return least_slopes(self._rows_s)

    def _computed(self, num_kv_tokens: int) -> CostModel:
        (others, rows, tokens, all_kv_tokens), kv_s = self._batch, self._costs.kv_s
        # If passes have held no other requests, the mean of earlier contexts says nothing about this pass.
        others_kv = min(others, 1.0) * max(all_kv_tokens - num_kv_tokens, 0.0)
        own_s = [kv_s(num_kv_tokens, count * num_kv_tokens) for count in (1, 2)]
        seconds = self._rows_s + kv_s(others_kv, rows * others_kv) + own_s[0]
        seconds += (own_s[1] - own_s[0]) * np.arange(MAX_NODES + 1)
        row_s = self._row_s + (own_s[1] - own_s[0])  # adding a line shifts all slopes of a hull equally
        plain_s = float(self._costs.curve.at(np.array(1.0 + others))) + kv_s(others_kv, others_kv) + own_s[0]
        # Plain steps run together only where no request drafts.
        all_plain_s = max(plain_s - self._single_s, MIN_SHARE_OF_SINGLE * plain_s)
        rate_to_beat = max((1.0 + others) / all_plain_s, (1.0 + others * tokens) / float(seconds[0]))
        shared = SharedCosts(self._costs.curve, own_s[0], own_s[1] - own_s[0], tokens)
        return CostModel(seconds, row_s, others * tokens, rate_to_beat, shared)


def rising(seconds: FloatArray, weights: FloatArray) -> FloatArray:
    """Return the isotonic regression of these seconds: the nearest non-decreasing ones in weighted least squares.

    seconds, weights, result: (n,) float64. A group that happened to be slow, and has little weight, thus costs what
    larger ones do.
    Source: pool adjacent violators, Barlow et al. 1972, Statistical Inference under Order Restrictions, chapter 1.
    """
    pools: list[tuple[float, float, int]] = []
    for second, weight in zip(seconds.tolist(), np.maximum(weights, MIN_WORTH).tolist(), strict=True):
        pool = (second, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            before = pools.pop()
            total = before[1] + pool[1]
            pool = ((before[0] * before[1] + pool[0] * pool[1]) / total, total, before[2] + pool[2])
        pools.append(pool)
    return np.array([second for second, _, count in pools for _ in range(count)])


def line_through(rows: FloatArray, seconds: FloatArray, weights: FloatArray) -> Curve:
    """Return the line through measurements in weighted relative least squares, from the fewest to the most rows.

    weights: how many measurements each is worth. Where few of them differ in rows, or all are old, the line is nearly
    as flat as UNKNOWN_ROW says, so that larger passes are tried again.
    """
    worth = np.maximum(weights, MIN_WORTH) / seconds**2
    mean_rows, mean_s = np.average(rows, weights=worth), np.average(seconds, weights=worth)
    prior, unknown_s = PRIOR_WORTH * (PRIOR_ROWS / seconds[0]) ** 2, UNKNOWN_ROW * seconds[0] / rows[0]
    covariance = np.sum(worth * (rows - mean_rows) * (seconds - mean_s)) + prior * unknown_s
    slope = max(covariance / (np.sum(worth * (rows - mean_rows) ** 2) + prior), 0.0)
    # A steep line would be zero or negative at its left end.
    points_s = np.maximum(mean_s + slope * (rows - mean_rows), MIN_SHARE_OF_MEAN * mean_s)
    return Curve(rows, points_s, float(unknown_s))


def corrected(base: Curve, rows: FloatArray, seconds: FloatArray, weights: FloatArray, worth: float) -> Curve:
    """Return a curve drawn towards measurements by their ratio to it; worth: how many measurements the curve is worth.

    Between measurements the ratio is interpolated, not the cost, so that the stairs of the curve stay where they are.
    """
    known_s = base.at(rows)
    points_s = rising((weights * seconds + worth * known_s) / (weights + worth), weights + worth)
    numbers = np.union1d(base.rows, rows)
    ratios = np.interp(numbers, rows, points_s / known_s)
    return Curve(numbers, np.maximum.accumulate(base.at(numbers) * ratios), base.row_s * float(ratios[-1]))


def least_slopes(seconds: FloatArray) -> FloatArray:
    """Return for each index the least mean rise from it to any later index, (N,) float64, infinite for the last one.

    That is the slope of the lower convex hull of the values from this index on.
    """
    values = seconds.tolist()
    slopes, hull = [float("inf")] * len(values), [len(values) - 1]
    for at in range(len(values) - 2, -1, -1):
        while len(hull) > 1 and _slope(values, at, hull[-2]) <= _slope(values, at, hull[-1]):
            hull.pop()
        slopes[at] = _slope(values, at, hull[-1])
        hull.append(at)
    return np.array(slopes)


def _slope(values: list[float], begin: int, end: int) -> float:
    return (values[end] - values[begin]) / (end - begin)
