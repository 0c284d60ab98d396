"""`python -m benchmarks.forward`: the cost surface of the native forward pass, t(rows, KV tokens), in process.

Each pass is listed with the time of its matrix products alone and its share of the arithmetic peak. Figures that are
compared are measured in turn, so that other work on the machine slows them alike.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoConfig

from benchmarks.deployment import CONFIG
from native.compiling import NativeLibrary
from native.library import LIBRARY
from orchestrator.core.context import Context
from orchestrator.core.cost_model import PassCosts
from orchestrator.core.deployment.config import load_config
from orchestrator.core.messages.context import delta_of
from orchestrator.core.tree import TokenTree
from runtime.engine.kv.batch import Segment
from runtime.engine.paged import PagedModel
from runtime.engine.profile import NUM_CONTEXT, measured_costs
from runtime.models.load import load_model
from runtime.models.native.families import head_dim_of
from runtime.models.native.model import NativeModel

SHAPES = ((1, 1), (1, 8), (1, 11), (1, 24), (1, 64), (16, 1), (16, 11))
CONTEXTS = (128, 300, 512, 1024, 1792)
PREFILL_TOKENS = 256
#: Maximum cached tokens of all sequences of a pass, for which the cache has room.
MOST_CACHED = 17600
PRODUCTS = NativeLibrary(
    "products",
    Path(__file__).resolve().parent / "native",
    sources=("products.cpp",),
    headers=tuple(f"../../native/{name}" for name in LIBRARY.headers),
)


class Case(NamedTuple):
    """A pass: its sequences, the rows of each (root and drafts), and each one's tokens in the cache.

    num_threads: 0 = the model chooses.
    """

    num_sequences: int
    num_rows: int
    num_cached: int
    num_threads: int

    @property
    def rows(self) -> int:
        """Rows of the pass."""
        return self.num_sequences * self.num_rows

    @property
    def shape(self) -> str:
        """The rows; if there are several sequences, those of each."""
        return str(self.num_rows) if self.num_sequences == 1 else f"{self.num_sequences} × {self.num_rows}"


class Cost(NamedTuple):
    """Milliseconds of a pass and of its products alone, and a thread's peak in FLOP/s; one value each per round."""

    pass_ms: list[float]
    products_ms: list[float]
    peak_flops: list[float]


class Products:
    """The matrix products of one model's passes, without the rest."""

    def __init__(self, config: Any, is_bfloat16: bool, rounds_inputs: bool, max_threads: int) -> None:
        """Add the matrices; config: the transformers configuration of the model."""
        self._library, self._rounds_inputs = PRODUCTS.load(), int(rounds_inputs)
        self._library.products_new.restype = ctypes.c_void_p
        self._library.products_run.restype = self._library.products_peak.restype = ctypes.c_double
        self._handle = ctypes.c_void_p(self._library.products_new(max_threads))
        heads, size = config.num_attention_heads, head_dim_of(config)
        qkv = (heads + 2 * config.num_key_value_heads) * size
        layer = [
            (qkv, config.hidden_size),
            (config.hidden_size, heads * size),
            (2 * config.intermediate_size, config.hidden_size),
            (config.hidden_size, config.intermediate_size),
        ]
        head = config.vocab_size, config.hidden_size
        self._matrices: list[tuple[int, int]] = [*layer * config.num_hidden_layers, head]
        for outputs, inputs in self._matrices:
            self._library.products_add(self._handle, outputs, inputs, int(is_bfloat16), self._rounds_inputs)

    @property
    def flops_of_row(self) -> int:
        """Multiplications and additions for each row."""
        return sum(2 * outputs * inputs for outputs, inputs in self._matrices)

    def run_s(self, rows: int, num_threads: int) -> float:
        """Return the seconds of all products."""
        return float(self._library.products_run(self._handle, rows, num_threads))

    def peak_flops(self) -> float:
        """Return the arithmetic peak of one thread, in FLOP/s."""
        return float(self._library.products_peak(self._rounds_inputs))


class Passes:
    """Passes of one loaded model."""

    def __init__(self, model: NativeModel) -> None:
        self._model = model
        self._paged = PagedModel(model, 1024, 16, share=False)

    def costs(self) -> PassCosts | None:
        """Return the costs that an engine would measure at load, or None if that took too long."""
        return measured_costs(self._paged)

    def open(self, case: Case) -> Callable[[], float]:
        """Return a function that runs the pass and returns its seconds."""
        segments = [self._segment(case, number) for number in range(case.num_sequences)]

        def run_s() -> float:
            self._model.num_threads = case.num_threads or None
            began_s = time.perf_counter()
            self._paged.forward(segments)
            return time.perf_counter() - began_s

        return run_s

    def close(self, case: Case) -> None:
        """Forget the sequences of a case."""
        for number in range(case.num_sequences):
            self._paged.sequences.drop(1 + number)

    def _segment(self, case: Case, number: int) -> Segment:
        """Return a chain of drafts after a context whose rows are in the cache."""
        ids = [(7 * place + number) % self._model.vocab_size for place in range(case.num_cached + 1)]
        tree = TokenTree.chain([1 + node for node in range(case.num_rows - 1)])
        sequence = self._paged.sequences.open(delta_of(Context(ids), 0, 1 + number, ""), tree.num_nodes, tree.num_nodes)
        for first in range(0, case.num_cached, PREFILL_TOKENS):
            self._paged.forward([Segment(sequence, first, min(first + PREFILL_TOKENS, case.num_cached))])
        return Segment(sequence, case.num_cached, case.num_cached + 1, tree)


def measure(passes: Passes, products: Products, case: Case, rounds: int) -> Cost:
    """Return the cost of a case, after one warm-up round."""
    run_s = passes.open(case)
    cost = Cost([], [], [])
    for _ in range(1 + rounds):
        cost.pass_ms.append(1e3 * run_s())
        cost.products_ms.append(1e3 * products.run_s(case.rows, case.num_threads))
        cost.peak_flops.append(products.peak_flops())
    passes.close(case)
    return Cost(*(values[1:] for values in cost))


def row_of(case: Case, cost: Cost, flops_of_row: int) -> str:
    """Return a row of the table."""
    pass_ms, products_ms = statistics.median(cost.pass_ms), statistics.median(cost.products_ms)
    ratio = statistics.median(a / b for a, b in zip(cost.pass_ms, cost.products_ms, strict=True))
    peak = max(cost.peak_flops) * case.num_threads
    share = flops_of_row * case.rows / (1e-3 * pass_ms) / peak
    return (
        f"| {case.shape} | {case.num_cached} | {case.num_threads} | {pass_ms:.2f} ({min(cost.pass_ms):.2f}) "
        f"| {products_ms:.2f} ({min(cost.products_ms):.2f}) | {ratio:.2f} | {100 * share:.0f} % |"
    )


def print_predicted(passes: Passes, costs: PassCosts, rounds: int, contexts: Sequence[int]) -> None:
    """Print the time of passes beside two predictions from the costs measured at load.

    One is by rows and contexts, the other by rows alone, as if all had the measured context of NUM_CONTEXT tokens.
    """
    errors: list[tuple[float, float]] = []
    print("| rows | KV tokens | pass, ms | predicted | by rows alone |\n|---|---:|---:|---:|---:|")
    for num_cached in contexts:
        for num_sequences, num_rows in (*SHAPES, (4, 4), (16, 4)):
            if num_sequences * num_cached > MOST_CACHED:
                continue
            case = Case(num_sequences, num_rows, num_cached, 0)
            run_s, rows_s = passes.open(case), float(costs.curve.at(np.array(case.rows)))
            pass_s = statistics.median([run_s() for _ in range(2 + rounds)][2:])
            passes.close(case)
            kv_tokens = num_sequences * (num_cached + 1), case.rows * (num_cached + 1)
            by_contexts, by_rows = (
                (rows_s + costs.kv_s(*tokens)) / pass_s
                for tokens in (kv_tokens, (NUM_CONTEXT, case.rows * NUM_CONTEXT))
            )
            errors.append((abs(by_contexts - 1), abs(by_rows - 1)))
            cells = f"{1e3 * pass_s:.2f} | {by_contexts:.2f} × | {by_rows:.2f} ×"
            print(f"| {case.shape} | {num_cached} | {cells} |", flush=True)
    by_contexts, by_rows = (100 * statistics.mean(each) for each in zip(*errors, strict=True))
    print(f"\nmean error: {by_contexts:.0f} %, by rows alone {by_rows:.0f} %")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forward", description=__doc__)
    parser.add_argument("--target", default="", help="checkpoint folder; by default the demo's target")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the products")
    parser.add_argument("--rounds", type=int, default=20, help="measured passes of each case")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, help="tokens in the cache")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="threads of a pass")
    parser.add_argument("--predicted", action="store_true", help="compare with the costs that are measured at load")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Measure and print the table."""
    options = parse(arguments)
    torch.set_num_threads(1)
    folder = options.target or load_config(CONFIG).target
    model = load_model(folder, "cpu", options.dtype, kernels="native")
    if not isinstance(model, NativeModel):
        print("there is no native forward pass of this model here", file=sys.stderr)
        return 1
    passes = Passes(model)
    if options.predicted:
        model.prepare()
        if not (costs := passes.costs()):
            print("the passes could not be measured in time", file=sys.stderr)
            return 1
        print_predicted(passes, costs, options.rounds, options.contexts)
        return 0
    products = Products(
        AutoConfig.from_pretrained(folder), model.is_bfloat16, model.rounds_inputs, max(options.threads)
    )
    print("| rows | KV tokens | threads | pass, ms: median (least) | products alone, ms | ratio | share of the peak |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for num_threads in options.threads:
        for num_cached in options.contexts:
            for num_sequences, num_rows in SHAPES:
                case = Case(num_sequences, num_rows, num_cached, num_threads)
                print(row_of(case, measure(passes, products, case, options.rounds), products.flops_of_row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
