"""What a pass of the target costs by its rows and KV tokens, as measured at load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from orchestrator.core.arrays import FloatArray

#: An additional row is never taken to cost less than this fraction of a plain pass.
MIN_ROW = 0.001
#: A row costs this fraction of a plain pass where nothing has been measured: optimistic, so that drafts are tried.
UNKNOWN_ROW = 0.02


class PassCosts(NamedTuple):
    """Seconds of a pass: linear between the measured numbers of rows, and beyond the last; contexts add to it.

    rows: (n,) float64, increasing. seconds: (n,) float64, non-decreasing, of rows without a context. row_s: seconds per
    row beyond the last. token_s: seconds per token of a context, however many rows attend to it. row_token_s: seconds
    per token and row that attends to it.
    """

    rows: FloatArray
    seconds: FloatArray
    row_s: float
    token_s: float = 0.0
    row_token_s: float = 0.0

    @classmethod
    def measured(
        cls, rows: Sequence[int], seconds: FloatArray, token_s: float = 0.0, row_token_s: float = 0.0
    ) -> PassCosts:
        """Return the costs through measurements; rows: increasing, at least two.

        A time that is higher than one of more rows counts halfway between the running maximum and minimum.
        """
        rising = (np.maximum.accumulate(seconds) + np.minimum.accumulate(seconds[::-1])[::-1]) / 2
        numbers = np.array(rows, np.float64)
        row_s = max((rising[-1] - rising[0]) / (numbers[-1] - numbers[0]), MIN_ROW * rising[0])
        return cls(numbers, rising, float(row_s), token_s, row_token_s)

    def at(self, rows: FloatArray) -> FloatArray:
        """Return the seconds of passes with these numbers of rows, without contexts; float64 of the same shape."""
        beyond = np.maximum(rows - self.rows[-1], 0.0)
        seconds: FloatArray = np.interp(rows, self.rows, self.seconds) + self.row_s * beyond
        return seconds

    def kv_s(self, num_kv_tokens: float, num_row_kv_tokens: float) -> float:
        """Return what the contexts of a pass add; num_row_kv_tokens: tokens times the rows that attend to them."""
        return self.token_s * num_kv_tokens + self.row_token_s * num_row_kv_tokens


#: The assumed costs where nothing has been measured, in plain passes.
UNKNOWN = PassCosts(np.array([1.0]), np.array([1.0]), UNKNOWN_ROW)
