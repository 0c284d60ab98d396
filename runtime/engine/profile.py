"""Measures at load what a pass of the target costs by its rows, so that drafts need not be tried in every size."""

from __future__ import annotations

import logging
import statistics
import time
from collections import defaultdict

import torch

from orchestrator.core.context import Context
from orchestrator.core.errors import ServingError
from orchestrator.core.surfaces import Curve
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
#: Tokens of the context; the first ones are read first: where they take too long, the others are not read at all.
NUM_CONTEXT, NUM_FIRST = 256, 16
SEQUENCE = 1


class _TooSlow(Exception):
    """Measuring has taken long enough."""


def measured_costs(paged: PagedModel) -> Curve | None:
    """Return the seconds of passes over one sequence by their rows, None if they could not be measured in time.

    It must be called before the engine's thread starts. It takes LIMIT_S and a pass or two at most; a model or a
    cache without room for the context and the largest tree is not measured.
    """
    context, most = Context([1] * NUM_CONTEXT), max(NUM_ROWS)
    seconds: dict[int, list[float]] = defaultdict(list)
    try:
        sequence = paged.sequences.open(delta_of(context, 0, SEQUENCE, "profile"), most, most)
        try:
            begun_s = time.monotonic()
            paged.forward([Segment(sequence, 0, NUM_FIRST, TokenTree.bare())])
            _check(begun_s + LIMIT_S * NUM_FIRST / NUM_CONTEXT)
            paged.forward([Segment(sequence, NUM_FIRST, NUM_CONTEXT, TokenTree.bare())])
            for _ in range(NUM_ROUNDS):
                for num_rows in NUM_ROWS:
                    segment = Segment(sequence, NUM_CONTEXT - 1, NUM_CONTEXT, TokenTree.chain([1] * (num_rows - 1)))
                    seconds[num_rows].append(_pass_s(paged, segment, begun_s + LIMIT_S))
        finally:
            paged.sequences.drop(SEQUENCE)
    except _TooSlow:
        pass
    except (ServingError, RuntimeError) as error:  # torch's lack of memory is a RuntimeError
        log.warning("the passes were not measured: %s", error)
        return None
    known = {num_rows: min(each) for num_rows, each in seconds.items() if each}
    return Curve.measured([*known], [*known.values()]) if max(known, default=0) >= LEAST_ROWS else None


def _pass_s(paged: PagedModel, segment: Segment, end_s: float) -> float:
    times = []
    for _ in range(NUM_TIMED):
        _check(end_s)
        began_s = time.perf_counter()
        paged.forward([segment])
        if paged.model.device.type == "cuda":
            torch.cuda.synchronize(paged.model.device)
        times.append(time.perf_counter() - began_s)
    return statistics.median(times[1:])


def _check(end_s: float) -> None:
    if time.monotonic() > end_s:
        raise _TooSlow
