"""Measures at load what a pass of the target costs by its rows, so that drafts need not be tried in every size."""

from __future__ import annotations

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

#: Rows of the passes: all sizes, and both sides of the multiples at which the cost may rise by a stair.
NUM_ROWS = (1, 2, 3, 4, 6, 8, 9, 12, 16, 17, 24, 25, 32, 33, 48, 64, 128)
#: Passes in a row of one size: the first finds the caches full of another, the middle one of the others counts.
NUM_TIMED = 5
#: Each size counts by the best of so many rounds. None begins after so long, and the first ends then: a large model on
#: a slow machine is measured with few rows alone.
NUM_ROUNDS, LIMIT_S = 3, 2.0
NUM_CONTEXT = 256
SEQUENCE = 1


def measured_costs(paged: PagedModel) -> Curve | None:
    """Return the seconds of passes over one sequence by their rows, None if fewer than two sizes could be measured.

    It must be called before the engine's thread starts. A model or a cache without room for the context and the largest
    tree is not measured.
    """
    context, most = Context([1] * NUM_CONTEXT), max(NUM_ROWS)
    try:
        sequence = paged.sequences.open(delta_of(context, 0, SEQUENCE, "profile"), most, most)
    except ServingError:
        return None
    seconds: dict[int, list[float]] = defaultdict(list)
    try:
        paged.forward([Segment(sequence, 0, NUM_CONTEXT, TokenTree.bare())])
        end_s = time.monotonic() + LIMIT_S
        for _ in range(NUM_ROUNDS):
            for num_rows in NUM_ROWS:
                if time.monotonic() > end_s:
                    break
                segment = Segment(sequence, NUM_CONTEXT - 1, NUM_CONTEXT, TokenTree.chain([1] * (num_rows - 1)))
                seconds[num_rows].append(_pass_s(paged, segment))
    finally:
        paged.sequences.drop(SEQUENCE)
    return Curve.measured([*seconds], [min(each) for each in seconds.values()]) if len(seconds) > 1 else None


def _pass_s(paged: PagedModel, segment: Segment) -> float:
    times = []
    for _ in range(NUM_TIMED):
        began_s = time.perf_counter()
        paged.forward([segment])
        if paged.model.device.type == "cuda":
            torch.cuda.synchronize(paged.model.device)
        times.append(time.perf_counter() - began_s)
    return statistics.median(times[1:])
