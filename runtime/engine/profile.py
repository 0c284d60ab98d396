"""Measures at load what a pass of the target costs by its rows and KV tokens, so that sizes need not be tried out."""

from __future__ import annotations

import logging
import statistics
import time
from collections import defaultdict

import numpy as np
import torch

from orchestrator.core.context import Context
from orchestrator.core.costs import PassCosts
from orchestrator.core.errors import ServingError
from orchestrator.core.messages.context import delta_of
from orchestrator.core.tree import TokenTree
from runtime.engine.kv.batch import Segment
from runtime.engine.paged import PagedModel

log = logging.getLogger(__name__)

#: Rows of the measured passes: small sizes, and both sides of the multiples at which the cost may jump.
NUM_ROWS = (1, 2, 3, 4, 6, 8, 9, 12, 16, 17, 24, 25, 32, 33, 48, 64, 128)
#: Consecutive passes of one size. The first is ignored, since the CPU's caches hold another size's data; of the others
#: the fastest counts, since other work on the machine slows some of them.
NUM_TIMED = 5
#: The best of NUM_ROUNDS rounds counts for each size. Measuring stops after LIMIT_S, between two passes; a curve over
#: fewer rows than MIN_ROWS is of no use.
NUM_ROUNDS, LIMIT_S, MIN_ROWS = 3, 2.0, 8
#: Tokens of the context. NUM_FIRST of them are read first; if that takes too long, the others are not read.
NUM_CONTEXT, NUM_FIRST = 256, 16
#: Passes of KV_ROWS rows are measured after the context and after one of NUM_LONG tokens, in KV_ROUNDS rounds; the
#: difference is what the context costs. Unless it is positive in CERTAIN_ROUNDS of them, it counts as noise and the
#: cost as 0; pure noise would show a cost that often in 1 of 28 cases.
NUM_LONG, KV_ROWS, KV_ROUNDS, CERTAIN_ROUNDS = 1024, (1, 24), 8, 7
#: Rows without a context are taken to cost at least this fraction of rows after the short context.
MIN_SHARE_OF_SHORT = 0.1
SEQUENCE = 1


class _TooSlow(Exception):
    """Measuring has used up its time."""


class _Profile:
    """The measured times of passes over one sequence of a model; measuring stops when LIMIT_S is over.

    rows_s: number of rows → seconds of its passes after NUM_CONTEXT tokens. token_s: each of KV_ROWS → the seconds that
    each additional token of the context adds.
    """

    def __init__(self, paged: PagedModel, num_tokens: int) -> None:
        most = max(NUM_ROWS)
        self._paged, self._num_read, self._num_tokens = paged, 0, num_tokens
        self._sequence = paged.sequences.open(delta_of(Context([1] * num_tokens), 0, SEQUENCE, "profile"), most, most)
        self._end_s = time.monotonic() + LIMIT_S
        self.rows_s: dict[int, list[float]] = defaultdict(list)
        self.token_s: dict[int, list[float]] = defaultdict(list)

    def measure(self) -> None:
        """Measure everything; raise _TooSlow when the time is used up."""
        self._read(1)  # includes costs that are paid only once
        self._read(1 + NUM_FIRST, LIMIT_S * NUM_FIRST / NUM_CONTEXT)
        self._read(NUM_CONTEXT)
        self._measure_rows()
        if self._num_tokens >= 2 * NUM_CONTEXT:
            self._measure_contexts()
        for _ in range(NUM_ROUNDS - 1):
            self._measure_rows()

    def _read(self, last: int, limit_s: float = LIMIT_S) -> None:
        end_s = min(time.monotonic() + limit_s, self._end_s)
        self._paged.forward([Segment(self._sequence, self._num_read, last)])
        self._num_read = last
        if time.monotonic() > end_s:
            raise _TooSlow

    def _measure_rows(self) -> None:
        for num_rows in NUM_ROWS:
            pass_s = self._pass_s(NUM_CONTEXT, num_rows)  # may raise, so it comes before the key is added
            self.rows_s[num_rows].append(pass_s)

    def _measure_contexts(self) -> None:
        for last in range(2 * NUM_CONTEXT, self._num_tokens + 1, NUM_CONTEXT):
            self._read(last)
        num_more = self._num_read - NUM_CONTEXT
        for _ in range(KV_ROUNDS):
            for num_rows in KV_ROWS:
                short_s, long_s = (self._pass_s(num_tokens, num_rows) for num_tokens in (NUM_CONTEXT, self._num_read))
                self.token_s[num_rows].append((long_s - short_s) / num_more)

    def _pass_s(self, num_tokens: int, num_rows: int) -> float:
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
        return min(times[1:])


def measured_costs(paged: PagedModel) -> PassCosts | None:
    """Return what passes over one sequence cost, in seconds; None if they could not be measured in time.

    Call it before the engine's thread starts. It takes at most LIMIT_S and a pass or two. A model or cache without room
    for the context and the largest tree is not measured. If there is no time or room for the long context, or some
    layers see only a window of it, contexts are taken to cost nothing.
    """
    pool = paged.sequences.pool
    room = min(paged.model.max_positions, pool.num_available * pool.block_tokens) - max(NUM_ROWS)
    num_tokens = NUM_CONTEXT if paged.model.has_windows else max(min(NUM_LONG, room), NUM_CONTEXT)
    try:
        profile = _Profile(paged, num_tokens)
        try:
            profile.measure()
        except _TooSlow:
            pass
        finally:
            paged.sequences.drop(SEQUENCE)
    except (ServingError, RuntimeError) as error:  # torch raises RuntimeError when it runs out of memory
        log.warning("the passes were not measured: %s", error)
        return None
    return _costs_of(profile) if max(profile.rows_s, default=0) >= MIN_ROWS else None


def _costs_of(profile: _Profile) -> PassCosts:
    rows, seconds = np.array([*profile.rows_s], np.float64), np.array([min(each) for each in profile.rows_s.values()])
    few, many = (_certain(profile.token_s[num_rows]) for num_rows in KV_ROWS)
    row_token_s = max((many - few) / (KV_ROWS[1] - KV_ROWS[0]), 0.0)
    token_s = max(few - KV_ROWS[0] * row_token_s, 0.0)
    rows_s = np.maximum(seconds - NUM_CONTEXT * (token_s + row_token_s * rows), MIN_SHARE_OF_SHORT * seconds)
    return PassCosts.measured(rows.astype(int).tolist(), rows_s, token_s, row_token_s)


def _certain(differences: list[float]) -> float:
    """Return the median difference if enough rounds show a cost, otherwise 0."""
    is_certain = sum(difference > 0.0 for difference in differences) >= CERTAIN_ROUNDS
    return statistics.median(differences) if is_certain else 0.0
