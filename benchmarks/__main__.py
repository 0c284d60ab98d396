"""`make bench`: acceptance length and speed of the drafting methods through the real server, fairly compared.

Every run starts from a cold cache (with its own salt), the methods take turns, one warm-up run of each is dropped, and
prefill and decoding are timed separately (docs/protocol.md, Fair comparison).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

import launcher
from benchmarks import picture, report
from benchmarks.deployment import ROOT, settled_metrics
from benchmarks.figures import compare_with_peers, rows
from benchmarks.samples import BenchError, Runner, Sample, check_prefix_hits, measure
from benchmarks.server import ConcurrentRun, Count, Method, Passes, measure_concurrent
from benchmarks.traffic import QUESTIONS, Prompt, prompts_of_length, read_questions
from orchestrator.core.deployment.config import ServingConfig, load_config
from orchestrator.core.errors import ServingError
from orchestrator.core.methods import METHODS, PROPOSED

BASE = "none"
PEERS = ("transformers", "llama.cpp")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command's arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=ROOT / "serving.toml", help="the deployment")
    parser.add_argument("--url", help="gRPC address of a running server of this deployment; else one is started")
    parser.add_argument(
        "--methods",
        nargs="+",
        help='method, or method:{"parameter": value} (all that the deployment serves)',
    )
    parser.add_argument(
        "--prompts", type=Path, default=QUESTIONS, help="questions in Spec-Bench's layout (%(default)s)"
    )
    parser.add_argument("--tasks", nargs="+", help="categories of the questions (all)")
    parser.add_argument("--num-prompts", type=int, default=8, help="prompts per task (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens per run (%(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="runs per method and prompt (%(default)s)")
    parser.add_argument("--temperature", type=float, help="sample, with --seed; otherwise greedy")
    parser.add_argument("--seed", type=int, default=0, help="seed of sampled runs (%(default)s)")
    parser.add_argument("--peers", nargs="*", choices=PEERS, help="other software to measure in this process (all)")
    parser.add_argument("--contexts", nargs="*", type=int, default=[], help="also measure prompts of this many tokens")
    parser.add_argument("--concurrency", nargs="*", type=int, default=[], help="also this many requests at once")
    parser.add_argument(
        "--json", type=Path, default=ROOT / "docs/figures/bench.json", help="where the figures are saved"
    )
    args = parser.parse_args(arguments)
    args.peers = list(PEERS) if args.peers == [] else args.peers or []
    if args.peers and args.temperature:
        parser.error("--peers are greedy: leave out --temperature")
    return args


class Endpoint(NamedTuple):
    """A server's gRPC address, and the function that counts its passes; it returns None for a server run elsewhere."""

    url: str
    count_passes: Count


@contextlib.contextmanager
def serving(args: argparse.Namespace) -> Iterator[Endpoint]:
    """Yield the server; without --url, start it here."""
    if args.url:
        yield Endpoint(args.url, lambda: None)
        return

    def count() -> Passes:
        found = settled_metrics(server)
        return Passes(found["target", "passes_total"], found["target", "pass_requests_total"])

    with launcher.Server(args.config) as server:
        yield Endpoint(server.grpc_url, count)


def bench(args: argparse.Namespace, config: ServingConfig, endpoint: Endpoint) -> None:
    """Measure, print and save."""
    options = {"temperature": args.temperature, "seed": args.seed} if args.temperature else {}
    with grpcclient.InferenceServerClient(endpoint.url) as client:
        triton = client.get_server_metadata(client_timeout=10).version
        about = report.conditions(config, triton) | {"settings": settings(args)}
        methods = [Method.parse(text, client, options) for text in args.methods]
        with tempfile.TemporaryDirectory() as folder:
            runners: list[Runner] = [*methods, *peers(args, config, Path(folder))]
            prompts = prompts_of(args, config)
            samples = measure_tasks(runners, prompts, args)
    concurrent = measure_concurrency(methods, endpoint, prompts, args)
    about["prefix_hits_equal"] = check_prefix_hits(samples) or "not reported by the server"
    about["load_average_after"] = os.getloadavg()[0]
    publish(args, about, samples, concurrent)


def methods_of(config: ServingConfig) -> list[str]:
    """Return the methods that a deployment serves, plain decoding first; `predicted` needs a prediction."""
    has_statistics = bool(config.ngram_tables or config.corpus_index or config.remember_tokens)
    lacks = {"predicted", *(() if has_statistics else ("ngram",))}
    served = [name for name in PROPOSED if METHODS[name].drafter in ("", *config.drafters) and name not in lacks]
    return [BASE, *(name for name in served if name != BASE)]


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that influence the figures."""
    where = ("config", "url", "json")
    return {name: value for name, value in vars(args).items() if name not in where}


def peers(args: argparse.Namespace, config: ServingConfig, folder: Path) -> list[Runner]:
    """Load the peers that --peers names; converted weights go to `folder`. Raises BenchError if one is missing.

    Their threads spin while they wait, which is their libraries' default and several times faster on an idle machine;
    the server is idle while a peer runs.
    """
    if not args.peers:
        return []
    from benchmarks.peers import llama_cpp_peer, transformers_peer

    loaders: dict[str, Callable[[], Sequence[Runner]]] = {
        "transformers": partial(transformers_peer.load_peers, config.target, config.draft, config.dtype),
        "llama.cpp": partial(llama_cpp_peer.load_peers, config.target, config.draft, folder, os.cpu_count() or 1),
    }
    try:
        return [runner for name in args.peers for runner in loaders[name]()]
    except ImportError as error:
        raise BenchError(f"--peers: {error.name} is not installed: pip install '.[peers]' compiles it") from None


def prompts_of(args: argparse.Namespace, config: ServingConfig) -> dict[str, list[Prompt]]:
    """Return the prompts of --tasks and of --contexts, by task."""
    held_out = read_questions(args.prompts, config.target)
    if unknown := [task for task in args.tasks or () if task not in held_out]:
        raise BenchError(f"--tasks: no category {unknown[0]!r} in {args.prompts}, which has {', '.join(held_out)}")
    prompts = {task: held_out[task][: args.num_prompts] for task in args.tasks or held_out}
    for num_tokens in args.contexts:
        task = f"context {num_tokens}"
        prompts[task] = prompts_of_length(config.target, held_out, task, num_tokens, args.num_prompts)
    return prompts


def measure_tasks(
    runners: Sequence[Runner], prompts: Mapping[str, Sequence[Prompt]], args: argparse.Namespace
) -> list[Sample]:
    """Measure every task and print the progress."""
    samples: list[Sample] = []
    for task, some in prompts.items():
        fitting = sum(all(map(runner.fits, some)) for runner in runners)
        expected = len(samples) + len(some) * fitting * args.turns
        for sample in measure(runners, some, args.turns, args.max_tokens):
            samples.append(sample)
            if sys.stderr.isatty():
                print(f"\r{task}: {len(samples)}/{expected} runs", end="", file=sys.stderr, flush=True)
        print(f"\r{task}: done" + " " * 20, file=sys.stderr, flush=True)
    return samples


def measure_concurrency(
    methods: Sequence[Method], endpoint: Endpoint, by_task: Mapping[str, Sequence[Prompt]], args: argparse.Namespace
) -> list[ConcurrentRun]:
    """Measure each number of --concurrency requests at once, over prompts of all tasks."""
    mixed = [prompt for group in zip(*by_task.values(), strict=False) for prompt in group]
    runs: list[ConcurrentRun] = []
    for number in args.concurrency:
        prompts = list(itertools.islice(itertools.cycle(mixed), number))
        fitting = [method for method in methods if all(map(method.fits, prompts))]
        runs += measure_concurrent(fitting, endpoint.url, prompts, args.turns, args.max_tokens, endpoint.count_passes)
    return runs


def publish(
    args: argparse.Namespace, about: dict[str, Any], samples: Sequence[Sample], concurrent: Sequence[ConcurrentRun]
) -> None:
    """Print the tables and save everything."""
    base = args.methods[0] if BASE not in args.methods else BASE
    found = rows(samples, base)
    print(report.table(found))
    if split := report.split_table(samples):
        print(f"\n{split}")
    figures: dict[str, Any] = {"base": base, "rows": [asdict(row) for row in found]}
    if args.peers:
        comparisons = compare_with_peers(samples, base, args.methods, args.peers)
        print(f"\n{report.comparison_table(comparisons)}")
        figures["peers"] = [asdict(comparison) for comparison in comparisons]
    if concurrent:
        print(f"\n{report.concurrency_table(concurrent, base)}")
    if about["prefix_hits_equal"] is not True:
        print("\nThe server does not report its prefix hits: whether they were equal could not be checked.")
    print("\n" + "; ".join(f"{name} {value}" for name, value in about.items() if name != "settings"))
    report.save(args.json, about, figures, samples, concurrent)
    picture.draw(found, base, args.json.with_suffix(".svg"))
    print(f"saved in {args.json}, drawn in {args.json.with_suffix('.svg')}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 1 when the server fails or a comparison was not fair."""
    args = parse(arguments)
    try:
        config = load_config(args.config)
        args.methods = args.methods or methods_of(config)
        with serving(args) as endpoint:
            bench(args, config, endpoint)
    except KeyboardInterrupt:
        return 130
    except (ServingError, InferenceServerException) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
