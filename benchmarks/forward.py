"""`python -m benchmarks.forward`: the time of native forward passes by rows, in process, in several dtypes.

The passes of a round follow one another, so that other work on the machine slows them alike: compare their ratios.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.deployment import CONFIG
from orchestrator.core.context import Context
from orchestrator.core.deployment.config import load_config
from orchestrator.core.messages.context import delta_of
from orchestrator.core.tree import TokenTree
from runtime.engine.kv.batch import Segment
from runtime.engine.paged import PagedModel
from runtime.models.load import load_model

PREFILL_TOKENS = 256


def passes(paged: PagedModel, rows: Sequence[int], num_cached: int) -> list[Callable[[], None]]:
    """Return passes of so many rows each: a token and a chain of drafts after a context in the cache."""
    return [_open(paged, number, each, num_cached) for number, each in enumerate(rows, 1)]


def _open(paged: PagedModel, number: int, rows: int, num_cached: int) -> Callable[[], None]:
    ids = [(7 * place + number) % paged.model.vocab_size for place in range(num_cached + 1)]
    tree = TokenTree.chain([1 + node for node in range(rows - 1)])
    sequence = paged.sequences.open(delta_of(Context(ids), 0, number, ""), tree.num_nodes, tree.num_nodes)
    for first in range(0, num_cached, PREFILL_TOKENS):
        paged.forward([Segment(sequence, first, min(first + PREFILL_TOKENS, num_cached))])
    segment = Segment(sequence, num_cached, num_cached + 1, tree)
    return lambda: void(paged.forward([segment]))


def void(_: torch.Tensor) -> None:
    """Drop a pass's logits."""


def measure(all_passes: Sequence[Callable[[], None]], rounds: int) -> list[list[float]]:
    """Return the milliseconds of each pass, one value a round, after a warm-up round."""
    times: list[list[float]] = [[] for _ in all_passes]
    for _ in range(1 + rounds):
        for run, taken in zip(all_passes, times, strict=True):
            began_s = time.perf_counter()
            run()
            taken.append(1e3 * (time.perf_counter() - began_s))
    return [taken[1:] for taken in times]


def ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(times, others, strict=True))


def main(arguments: Sequence[str]) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forward", description=__doc__)
    parser.add_argument("--target", default="", help="checkpoint folder or GGUF file; by default the demo's target")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "int8"], help="compared with the first")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16], help="rows of a pass; the first is t(1)")
    parser.add_argument("--cached", type=int, default=300, help="tokens in the cache")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    target, runs = options.target or load_config(CONFIG).target, []
    for dtype in options.dtypes:
        model = load_model(target, "cpu", dtype, kernels="native")
        model.num_threads = options.threads  # type: ignore[union-attr]
        paged = PagedModel(model, 512, 16, share=False)
        runs += passes(paged, options.rows, options.cached)
    times = measure(runs, options.rounds)
    print(f"| dtype | rows | ms, median (least) | ÷ {options.dtypes[0]} | ÷ {options.rows[0]} rows |")
    print("|---|---:|---:|---:|---:|")
    for place, taken in enumerate(times):
        of_dtype, of_rows = divmod(place, len(options.rows))
        same_rows, same_dtype = times[of_rows], times[of_dtype * len(options.rows)]
        cells = f"{statistics.median(taken):.2f} ({min(taken):.2f}) | {ratio(taken, same_rows):.2f}"
        print(f"| {options.dtypes[of_dtype]} | {options.rows[of_rows]} | {cells} | {ratio(taken, same_dtype):.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
