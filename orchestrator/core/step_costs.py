"""What a step of the target costs by the rows of its pass, learnt from the steps that are measured."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

#: Passes of similar size are averaged; each group ends at one of these numbers of rows.
GROUPS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096)
#: Weight of all earlier measurements in a group's mean, per measurement.
DISCOUNT = 0.95
#: A row that has not been measured is taken to cost this part of a plain step. It is optimistic, so that larger trees
#: are tried, and thereby measured, wherever they might pay.
UNKNOWN_ROW = 0.02


class Load(NamedTuple):
    """What the other requests put into a pass: rows, and the tokens that they get out of it."""

    rows: float
    tokens: float


class StepCosts:
    """Seconds of a step by the rows of its pass; shared by all requests of a process.

    clock: seconds, monotonic. Only ratios of costs are used, so that a factor common to all of them does not matter.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._groups: dict[int, tuple[float, float]] = {}  # group → mean rows, mean seconds
        self._request = Load(1.0, 1.0)  # of one request, on average
        self._num_others = 0.0
        self._lock = threading.Lock()

    def observe(self, num_rows: int, num_in_pass: int, num_tokens: int, seconds: float) -> None:
        """Learn from one request's step.

        num_rows, num_tokens: this request's. num_in_pass: the requests that shared the pass. seconds: of the step.
        """
        with self._lock:
            self._request = Load(_mean(self._request.rows, num_rows), _mean(self._request.tokens, num_tokens))
            self._num_others = _mean(self._num_others, num_in_pass - 1)
            rows = num_rows + (num_in_pass - 1) * self._request.rows
            group = bisect_left(GROUPS, rows)
            known = self._groups.get(group, (rows, seconds))
            self._groups[group] = (_mean(known[0], rows), _mean(known[1], seconds))

    def others(self) -> Load:
        """Return what the other requests are likely to put into the next pass."""
        return Load(self._num_others * self._request.rows, self._num_others * self._request.tokens)

    def seconds(self, most_rows: int, others: float = 0.0) -> list[float]:
        """Return the cost of 1…most_rows rows beside the rows of `others`; not decreasing.

        Between measured groups the cost is interpolated. Returns an empty list before the first measurement.
        """
        with self._lock:
            points = sorted(self._groups.values())
        if not points:
            return []
        slope = UNKNOWN_ROW * points[0][1]
        costs, place = [], 0
        for rows in range(1, most_rows + 1):
            while place < len(points) - 1 and points[place + 1][0] <= rows + others:
                place += 1
            costs.append(_cost(points, place, rows + others, slope))
        for at in range(1, len(costs)):
            costs[at] = max(costs[at], costs[at - 1])
        return costs


def _cost(points: list[tuple[float, float]], place: int, rows: float, unknown_slope: float) -> float:
    """Return the cost at `rows`, on the line from point `place` to the next one, or beyond the last one."""
    at_rows, at_s = points[place]
    if rows <= at_rows:
        return at_s
    if place + 1 == len(points):
        return at_s + unknown_slope * (rows - at_rows)
    next_rows, next_s = points[place + 1]
    return at_s + max(next_s - at_s, 0.0) * (rows - at_rows) / (next_rows - at_rows)


def _mean(mean: float, value: float) -> float:
    return DISCOUNT * mean + (1 - DISCOUNT) * value
