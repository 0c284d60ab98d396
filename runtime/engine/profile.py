"""Measures at load what a pass of the target costs by its rows and KV tokens, so that not every size need be tried."""

from __future__ import annotations

import logging
import statistics
import time
from collections import defaultdict

import numpy as np
import torch

from orchestrator.core.context import Context
from orchestrator.core.errors import ServingError
from orchestrator.core.surfaces import Curve, PassCosts
from orchestrator.core.tree import TokenTree
from orchestrator.wire.context import delta_of
from runtime.engine.paged import PagedModel
from runtime.kv.batch import Segment

log = logging.getLogger(__name__)

#: Rows of the passes: small sizes, and both sides of the multiples at which the cost may rise by a stair.
NUM_ROWS = (1, 2, 3, 4, 6, 8, 9, 12, 16, 17, 24, 25, 32, 33, 48, 64, 128)
#: Passes in a row of one size; the first finds the caches full of another's, and the median of the others counts.
NUM_TIMED = 5
#: Each size counts by the best of so many rounds. Measuring ends when it has taken so long, between two passes; a curve
#: over fewer rows than LEAST_ROWS is of no use.
NUM_ROUNDS, LIMIT_S, LEAST_ROWS = 3, 2.0, 8
#: Tokens of the context. The first ones are read first: where they take too long, the others are not read at all.
NUM_CONTEXT, NUM_FIRST = 256, 16
#: Tokens of the long context, and the rows that are measured behind both: what they take longer is the contexts' cost.
NUM_LONG, KV_ROWS = 1024, (1, 24)
#: Rows without a context are taken to cost at least this part of those behind the short one.
LEAST_OF_SHORT = 0.1
SEQUENCE = 1


class _TooSlow(Exception):
    """Measuring has taken long enough."""


class _Passes:
    """Passes over one sequence of a model, and their seconds by the tokens of the context and the rows."""

    def __init__(self, paged: PagedModel, num_tokens: int) -> None:
        most = max(NUM_ROWS)
        self._paged, self._num_read = paged, 0
        self._sequence = paged.sequences.open(delta_of(Context([1] * num_tokens), 0, SEQUENCE, "profile"), most, most)
        self._end_s = time.monotonic() + LIMIT_S
        self._seconds: dict[tuple[int, int], list[float]] = defaultdict(list)

    def read(self, last: int, limit_s: float = LIMIT_S) -> None:
        """Read the context up to `last`; raise _TooSlow if that has taken longer."""
        end_s = time.monotonic() + limit_s
        self._paged.forward([Segment(self._sequence, self._num_read, last)])
        self._num_read = last
        if time.monotonic() > min(end_s, self._end_s):
            raise _TooSlow

    def measure(self, num_tokens: int, num_rows: int) -> None:
        """Measure passes of so many rows behind so many tokens; raise _TooSlow if there is no time left for one."""
        segment = Segment(self._sequence, num_tokens - 1, num_tokens, TokenTree.chain([1] * (num_rows - 1)))
        times = []
        for _ in range(NUM_TIMED):
            if time.monotonic() > self._end_s:
                raise _TooSlow
            began_s = time.perf_counter()
            self._paged.forward([segment])
            if self._paged.model.device.type == "cuda":
                torch.cuda.synchronize(self._paged.model.device)
            times.append(time.perf_counter() - began_s)
        self._seconds[num_tokens, num_rows].append(statistics.median(times[1:]))

    def by_rows(self, num_tokens: int, num_rounds: int) -> dict[int, float]:
        """Return the seconds by rows behind so many tokens; num_rounds: of the last rounds, the best one counts."""
        return {rows: min(each[-num_rounds:]) for (tokens, rows), each in self._seconds.items() if tokens == num_tokens}


def measured_costs(paged: PagedModel) -> PassCosts | None:
    """Return what passes over one sequence cost, in seconds; None if they could not be measured in time.

    It must be called before the engine's thread starts. It takes LIMIT_S and a pass or two at most; a model or a
    cache without room for the context and the largest tree is not measured. Where the time or the room does not suffice
    for the long context, contexts are taken to cost nothing.
    """
    pool = paged.sequences.pool
    room = min(paged.model.max_positions, pool.num_available * pool.block_tokens) - max(NUM_ROWS)
    num_long = min(NUM_LONG, room)
    try:
        passes = _Passes(paged, max(num_long, NUM_CONTEXT))
        try:
            costs = _curve(passes)
            return _with_contexts(passes, costs, num_long) if costs and num_long >= 2 * NUM_CONTEXT else costs
        finally:
            paged.sequences.drop(SEQUENCE)
    except (ServingError, RuntimeError) as error:  # torch's lack of memory is a RuntimeError
        log.warning("the passes were not measured: %s", error)
        return None


def _curve(passes: _Passes) -> PassCosts | None:
    """Return the costs by rows behind NUM_CONTEXT tokens."""
    try:
        passes.read(1)  # it holds what is paid once
        passes.read(1 + NUM_FIRST, LIMIT_S * NUM_FIRST / NUM_CONTEXT)
        passes.read(NUM_CONTEXT)
        for _ in range(NUM_ROUNDS):
            for num_rows in NUM_ROWS:
                passes.measure(NUM_CONTEXT, num_rows)
    except _TooSlow:
        pass
    known = passes.by_rows(NUM_CONTEXT, NUM_ROUNDS)
    if max(known, default=0) < LEAST_ROWS:
        return None
    return PassCosts(Curve.measured([*known], [*known.values()]))


def _with_contexts(passes: _Passes, costs: PassCosts, num_long: int) -> PassCosts:
    """Return the costs with those of the contexts apart, if there is time to measure these."""
    try:
        for last in range(2 * NUM_CONTEXT, num_long + 1, NUM_CONTEXT):
            passes.read(last)
        for _ in range(NUM_ROUNDS):
            for num_rows in KV_ROWS:
                passes.measure(NUM_CONTEXT, num_rows)
                passes.measure(last, num_rows)
    except _TooSlow:
        return costs
    short_s, long_s = (passes.by_rows(num_tokens, NUM_ROUNDS) for num_tokens in (NUM_CONTEXT, last))
    few, many = ((long_s[rows] - short_s[rows]) / (last - NUM_CONTEXT) for rows in KV_ROWS)
    row_token_s = max((many - few) / (KV_ROWS[1] - KV_ROWS[0]), 0.0)
    token_s = max(few - KV_ROWS[0] * row_token_s, 0.0)
    curve = costs.curve
    contexts_s = NUM_CONTEXT * (token_s + row_token_s * curve.rows)
    rows_s = np.maximum(curve.seconds - contexts_s, LEAST_OF_SHORT * curve.seconds)
    return PassCosts(Curve.measured(curve.rows.tolist(), rows_s.tolist()), token_s, row_token_s)
