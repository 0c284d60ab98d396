"""Costs of a pass by its rows: curves through measurements, and the surface that drafts are sized by."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from orchestrator.core.types import FloatArray

#: A row that has not been measured is taken to cost this part of a plain step. It is optimistic, so that larger trees
#: are tried, and thereby measured, wherever they might pay.
UNKNOWN_ROW = 0.02
#: A further row is never taken to cost less than this part of a plain step.
LEAST_ROW = 0.001
#: A group whose measurements are all old is worth this many of them where it has to be weighed against others.
LEAST_WORTH = 1e-6
#: No point of a line costs less than this part of the mean.
LEAST_OF_MEAN = 0.1
#: A line is drawn as if a measurement so many rows away from all others had shown UNKNOWN_ROW; it is worth so much.
PRIOR_ROWS, PRIOR_WORTH = 8.0, 0.5


class Curve(NamedTuple):
    """Costs that are linear between points, and beyond the last one.

    rows: (n,) float64, rising. seconds: (n,) float64, never falling. row_s: of a row beyond the last.
    """

    rows: FloatArray
    seconds: FloatArray
    row_s: float

    @classmethod
    def measured(cls, rows: list[int], seconds: list[float]) -> Curve:
        """Return the curve through measurements that are worth the same; rows: rising, at least two."""
        points_s = rising(np.array(seconds), np.ones(len(seconds)))
        numbers = np.array(rows, np.float64)
        row_s = float((points_s[-1] - points_s[0]) / (numbers[-1] - numbers[0]))
        return cls(numbers, points_s, max(row_s, LEAST_ROW * float(points_s[0])))

    def at(self, rows: FloatArray) -> FloatArray:
        """Return the costs of passes with so many rows, float64 of the same shape."""
        beyond = np.maximum(rows - self.rows[-1], 0.0)
        costs: FloatArray = np.interp(rows, self.rows, self.seconds) + self.row_s * beyond
        return costs


#: What passes cost, in plain ones, where nothing has been measured.
UNKNOWN = Curve(np.array([1.0]), np.array([1.0]), UNKNOWN_ROW)


class Surface(NamedTuple):
    """What one request's rows cost in the next pass, beside those of the other requests.

    seconds: (N,) float64, index n: of the pass if the request has n + 1 rows; it never falls.
    row_s: (N,) float64, index n: the least that a row beyond n + 1 adds, on average up to any larger number of rows.
    others_tokens: what the other requests get out of the pass.
    rate: tokens of the batch per second without a draft of this request, or without any draft if that is more. Were it
    the former alone, requests that all draft under load would each find it worth its while.
    """

    seconds: FloatArray
    row_s: FloatArray
    others_tokens: float
    rate: float


def rising(seconds: FloatArray, weights: FloatArray) -> FloatArray:
    """Return the seconds that never fall and are nearest to these, (n,) float64, by their weighted squares.

    A group that happened to be slow, and is worth little, so costs what larger ones do.
    Source: pool adjacent violators, Barlow et al. 1972, Statistical Inference under Order Restrictions, chapter 1.
    """
    pools: list[tuple[float, float, int]] = []
    for second, weight in zip(seconds.tolist(), np.maximum(weights, LEAST_WORTH).tolist(), strict=True):
        pool = (second, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            before = pools.pop()
            total = before[1] + pool[1]
            pool = ((before[0] * before[1] + pool[0] * pool[1]) / total, total, before[2] + pool[2])
        pools.append(pool)
    return np.array([second for second, _, count in pools for _ in range(count)])


def line_through(rows: FloatArray, seconds: FloatArray, weights: FloatArray) -> Curve:
    """Return the line through measurements, by their weighted relative squares, between the least and the most rows.

    weights: how many measurements each is worth. Where few of them differ in rows, or all are old, the line is nearly
    as flat as UNKNOWN_ROW says, so that larger passes are tried again.
    """
    worth = np.maximum(weights, LEAST_WORTH) / seconds**2
    mean_rows, mean_s = np.average(rows, weights=worth), np.average(seconds, weights=worth)
    prior, unknown_s = PRIOR_WORTH * (PRIOR_ROWS / seconds[0]) ** 2, UNKNOWN_ROW * seconds[0] / rows[0]
    covariance = np.sum(worth * (rows - mean_rows) * (seconds - mean_s)) + prior * unknown_s
    slope = max(covariance / (np.sum(worth * (rows - mean_rows) ** 2) + prior), 0.0)
    # At its left end, a steep line would cost nothing or less.
    points_s = np.maximum(mean_s + slope * (rows - mean_rows), LEAST_OF_MEAN * mean_s)
    return Curve(rows, points_s, float(unknown_s))


def corrected(base: Curve, rows: FloatArray, seconds: FloatArray, weights: FloatArray, worth: float) -> Curve:
    """Return a curve drawn towards measurements, by the ratio of these to it; worth: how many of them it is worth.

    Between measurements the ratio is interpolated, not the cost: so the stairs of the curve stay where they are.
    """
    known_s = base.at(rows)
    points_s = rising((weights * seconds + worth * known_s) / (weights + worth), weights + worth)
    numbers = np.union1d(base.rows, rows)
    ratios = np.interp(numbers, rows, points_s / known_s)
    return Curve(numbers, np.maximum.accumulate(base.at(numbers) * ratios), base.row_s * float(ratios[-1]))


def surface_of(seconds: FloatArray, others_tokens: float = 0.0, plain_rate: float = 0.0) -> Surface:
    """Return the surface of these costs. plain_rate: tokens of the batch per second without any draft."""
    rate = max((1.0 + others_tokens) / float(seconds[0]), plain_rate)
    return Surface(np.ascontiguousarray(seconds), np.array(least_slopes(seconds.tolist())), others_tokens, rate)


def least_slopes(values: list[float]) -> list[float]:
    """Return for each index the least mean rise from it to any later index, infinite for the last one.

    That is the slope of the lower convex hull of the values from this index on.
    """
    slopes, hull = [float("inf")] * len(values), [len(values) - 1]
    for at in range(len(values) - 2, -1, -1):
        while len(hull) > 1 and _slope(values, at, hull[-2]) <= _slope(values, at, hull[-1]):
            hull.pop()
        slopes[at] = _slope(values, at, hull[-1])
        hull.append(at)
    return slopes


def _slope(values: list[float], begin: int, end: int) -> float:
    return (values[end] - values[begin]) / (end - begin)
