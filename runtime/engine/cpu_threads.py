"""How many threads a model's passes get on a CPU: measured at load, since it depends on model and machine.

A small model's products are too short to be worth sharing: waking a second thread costs more than it saves,
and takes a core from the other engine, the loop and the server.
"""

from __future__ import annotations

import os
import time

import torch

from orchestrator.core.context import Context
from orchestrator.core.tree import TokenTree
from orchestrator.wire.context import delta_of
from runtime.engine.paged import PagedModel
from runtime.kv.batch import Segment

NUM_CONTEXT, NUM_DRAFTS = 64, 8
NUM_TIMED = 10
# More threads must be faster by this much; a tie goes to fewer.
GAIN = 0.9


def choose_threads(paged: PagedModel) -> int:
    """Set and return the number of threads; OMP_NUM_THREADS in the environment is left as it is."""
    if paged.model.device.type != "cpu" or "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    best, best_s = 1, _pass_s(paged, 1)
    threads = 2
    while threads <= (os.cpu_count() or 1):
        pass_s = _pass_s(paged, threads)
        if pass_s < GAIN * best_s:
            best, best_s = threads, pass_s
        threads *= 2
    torch.set_num_threads(best)
    return best


def _pass_s(paged: PagedModel, threads: int) -> float:
    """Return the fastest of several passes over a small tree, in seconds."""
    torch.set_num_threads(threads)
    context = Context([1] * NUM_CONTEXT)
    tree = TokenTree.chain([1] * NUM_DRAFTS)
    sequence = paged.sequences.open(delta_of(context, 0, 1, "threads"), NUM_DRAFTS, NUM_DRAFTS)
    paged.forward([Segment(sequence, 0, NUM_CONTEXT, tree)])
    times = []
    for _ in range(NUM_TIMED):
        began_s = time.perf_counter()
        paged.forward([Segment(sequence, NUM_CONTEXT - 1, NUM_CONTEXT, tree)])
        times.append(time.perf_counter() - began_s)
    paged.sequences.drop(1)
    return min(times)
