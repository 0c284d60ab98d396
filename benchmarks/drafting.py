"""`python -m benchmarks.drafting`: the time of one draft of each head and of the draft model, in process.

The context is held-out text with the target's own hidden states; between two drafts it grows by a few tokens, as after
a step. Each drafter gets its method's default parameters. c is its time in plain passes of the target. On a busy
machine, compare CPU times with one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks.deployment import CONFIG
from benchmarks.proposing import text_of
from orchestrator.core.arrays import Features
from orchestrator.core.context import Context
from orchestrator.core.deployment.checkpoint import read_checkpoint
from orchestrator.core.deployment.config import ServingConfig, load_config
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.drafter import DraftRequest
from orchestrator.core.methods import METHODS
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.types import HeadInput, HiddenStates
from orchestrator.drafting.registry import select_method
from runtime.engine.calls import EngineCall
from runtime.engine.draft import DraftEngine
from runtime.engine.kv.batch import Segment
from runtime.engine.paged import PagedModel
from runtime.models import fused
from runtime.models.heads.build_heads import load_engine
from runtime.models.heads.engines import eagle, levels, trees
from runtime.models.load import load_model
from runtime.models.native.heads import NativeHead
from runtime.models.native.model import NativeModel

#: Tokens by which the context grows between two drafts.
STEP = 3
METHOD_NAMES = ("medusa", "redrafter", "eagle", "eagle2", "eagle3", "draft_model")
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(0.8, top_p=0.95, seed=1)}


class Stopwatch:
    """Adds up the seconds that wrapped functions take; time in a nested function counts only for the inner one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = [0.0]

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed under `name`."""

        def timed(*args: Any, **options: Any) -> Any:
            began_s = time.perf_counter()
            self._inner.append(0.0)
            try:
                return function(*args, **options)
            finally:
                spent_s = time.perf_counter() - began_s
                own_s = spent_s - self._inner.pop()
                self._inner[-1] += spent_s
                self.seconds[name] = self.seconds.get(name, 0.0) + own_s

        return timed


class Cost(NamedTuple):
    """The cost of a draft in milliseconds: median time, median CPU time, mean per part; its mean number of nodes."""

    median_ms: float
    cpu_ms: float
    parts_ms: dict[str, float]
    num_nodes: float


@contextlib.contextmanager
def split(watch: Stopwatch, engine: Any) -> Iterator[None]:
    """Time the parts of an engine's drafts: products, attention, selection; in native code, forward and selection."""
    timed = [
        (fused.PackedLinear, "forward", "products"),
        (eagle, "paged_tree_attention", "attention"),
        (levels, "rank", "selection"),
        *((kind, name, "selection") for kind in (trees.DynamicTree, trees.StaticTree)
          for name in ("add_children", "token_tree")),
    ]  # fmt: skip
    if isinstance(engine, DraftEngine):
        names = ("forward", "draft_chains") if isinstance(engine.paged.model, NativeModel) else ("forward",)
        timed += [(type(engine.paged.model), name, "forward") for name in names]
    with contextlib.ExitStack() as stack:
        for owner, name, part in timed:
            stack.enter_context(mock.patch.object(owner, name, watch.wrap(part, getattr(owner, name))))
        yield


def time_drafts(engine: Any, requests: Sequence[DraftRequest], first_timed: int) -> Cost:
    """Return the cost of the drafts, timed from number `first_timed` on."""
    watch, times_ms, cpu_ms, sizes = Stopwatch(), [], [], []
    native: NativeHead | None = getattr(engine, "native", None)
    with split(watch, engine):
        for number, request in enumerate(requests):
            if number == first_timed:
                watch.seconds.clear()
            answers: list[Any] = []
            calls = [EngineCall(request, time.monotonic() + 60.0, answers.append)]
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            while calls:
                calls = engine.advance(calls)
            spent_s, spent_cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
            if isinstance(answers[0], Exception):
                raise answers[0]
            if number >= first_timed:
                times_ms.append(1e3 * spent_s)
                cpu_ms.append(1e3 * spent_cpu_s)
                sizes.append(answers[0].tree.num_nodes)
                if native:
                    watch.seconds["selection"] = watch.seconds.get("selection", 0.0) + native.selection_s
                    watch.seconds["forward"] = watch.seconds.get("forward", 0.0) + native.call_s - native.selection_s
    parts_ms = {part: 1e3 * seconds / len(times_ms) for part, seconds in watch.seconds.items()}
    parts_ms["Python"] = statistics.mean(times_ms) - sum(parts_ms.values())
    return Cost(statistics.median(times_ms), statistics.median(cpu_ms), parts_ms, statistics.mean(sizes))


def requests_of(
    method: str, ids: Sequence[int], features: Features, num_context: int, sampling: Sampling
) -> list[DraftRequest]:
    """Return the draft calls of a request whose context grows from `num_context` tokens to all of `ids`.

    features: (len(ids), width), those of every position.
    """
    selected = select_method(method, "", frozenset({METHODS[method].drafter}), {})
    config: Any = selected.config.resolved(has_cheap_rows=False)  # type: ignore[attr-defined]
    found, sent = [], 0
    for length in range(num_context, len(ids), STEP):
        head, max_nodes, max_depth = HeadInput(), 0, 0
        if method == "draft_model":
            max_nodes = max_depth = config.draft_len
            head = config.shape
        else:
            first = max(sent - 1, 0) if METHODS[method].reads_every_state else length - 2
            head = replace(config.shape, features=features[first : length - 1], features_start=first)
            max_nodes, max_depth = config.max_nodes, config.num_levels
        delta = delta_of(Context(list(ids[:length])), sent, 1, "")
        found.append(DraftRequest(delta, sampling, max_nodes, max_depth, head))
        sent = length
    return found


def target_states(paged: PagedModel, ids: Sequence[int]) -> Features:
    """Run the target over `ids`; return each position's states, (n, width) float32: the last, then the layers'."""
    sequence = paged.sequences.open(delta_of(Context(list(ids)), 0, 1, ""), 16, 16)
    for first in range(0, len(ids), 256):
        paged.forward([Segment(sequence, first, min(first + 256, len(ids)))])
    slots = torch.tensor([sequence.slot(index) for index in range(len(ids))])
    states: Features = paged.cache.features[slots].float().numpy()
    return states


def pass_ms(paged: PagedModel, num_context: int, num_timed: int) -> tuple[float, float]:
    """Return the median time and CPU time, in ms, of plain passes: one row, the last of `num_context` tokens."""
    (sequence,) = paged.sequences._live.values()
    times_ms, cpu_ms = [], []
    for _ in range(num_timed):
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        paged.forward([Segment(sequence, num_context - 1, num_context)])
        times_ms.append(1e3 * (time.perf_counter() - began_s))
        cpu_ms.append(1e3 * (time.process_time() - began_cpu_s))
    return statistics.median(times_ms), statistics.median(cpu_ms)


def use_threads(model: Any, threads: int) -> None:
    """Let a model or head compute with `threads` threads."""
    torch.set_num_threads(threads)
    if isinstance(model, NativeModel | NativeHead):
        model.num_threads = threads


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kernels", nargs="+", choices=("torch", "native"), default=["torch", "native"])
    parser.add_argument("--methods", nargs="+", choices=METHOD_NAMES, default=METHOD_NAMES)
    parser.add_argument("--context", type=int, default=300, help="tokens before the first draft (%(default)s)")
    parser.add_argument("--drafts", type=int, default=40, help="timed drafts (%(default)s)")
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1, 2], help="CPU threads of the engines (%(default)s)"
    )
    parser.add_argument("--sampling", nargs="+", choices=SAMPLINGS, default=["greedy"])
    options = parser.parse_args(arguments)
    for kernels in options.kernels:
        for threads in options.threads:
            measure(load_config(CONFIG).model_copy(update={"kernels": kernels}), threads, options)
    return 0


def measure(config: ServingConfig, threads: int, options: argparse.Namespace) -> None:
    """Print the rows for one kind of kernels and one number of threads."""
    num_warm = 3
    ids = text_of(options.context + STEP * (options.drafts + num_warm), read_checkpoint(config.target).tokenizer)
    both = HiddenStates.LAST | HiddenStates.LAYERS
    target = PagedModel(load_model(config.target, "cpu", "float32", both, config.kernels), 64, config.block_tokens)
    use_threads(target.model, threads)
    states = target_states(target, ids)
    num_last = target.model.feature_columns(HiddenStates.LAST).stop
    plain_ms, plain_cpu_ms = pass_ms(target, options.context, 30)
    print(f"\n{config.kernels}, {threads} threads: a plain pass of the target takes {plain_ms:.2f} ms, ", end="")
    print(f"{plain_cpu_ms:.2f} ms of CPU time\n")
    print("| method | sampling | nodes | ms a draft | c | CPU ms | c | of it |\n|---|---|---:|---:|---:|---:|---:|---|")
    for method in options.methods:
        engine = engine_of(method, config)
        use_threads(engine.paged.model if method == "draft_model" else engine.native, threads)
        features = states[:, num_last:] if method == "eagle3" else states[:, :num_last]
        for name in options.sampling:
            requests = requests_of(method, ids, features, options.context, SAMPLINGS[name])
            cost = time_drafts(engine, requests, num_warm)
            engine.sequences.drop(1)
            parts = ", ".join(f"{part} {ms:.2f}" for part, ms in cost.parts_ms.items())
            row = f"{cost.num_nodes:.1f} | {cost.median_ms:.2f} | {cost.median_ms / plain_ms:.2f}"
            cpu = f"{cost.cpu_ms:.2f} | {cost.cpu_ms / plain_cpu_ms:.2f}"
            print(f"| {method} | {name} | {row} | {cpu} | {parts} |", flush=True)


def engine_of(method: str, config: ServingConfig) -> Any:
    """Return the engine that drafts for a method."""
    if method != "draft_model":
        return load_engine(METHODS[method].drafter, config)[1]
    model = load_model(config.draft, "cpu", "float32", kernels=config.kernels)
    return DraftEngine(PagedModel(model, 64, config.block_tokens))


if __name__ == "__main__":
    sys.exit(main())
