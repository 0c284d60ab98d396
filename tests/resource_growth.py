"""`python -m tests.resource_growth`: mixed traffic, 2,000 steps to warm up and 10,000 to measure, in which nothing may grow.

Invariant: after the warm-up no process grows by 8 MB, shared memory does not grow, and no KV block stays held.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from benchmarks.deployment import CONFIG, engine_metrics
from benchmarks.traffic import Prompt, read_prompts
from clients.generate import stream
from launcher import Server
from orchestrator.core.methods import METHODS
from tests.support.client_pool import ClientPool
from tests.support.mixed_traffic import NUM_AT_ONCE, Traffic

#: The drafters that keep a cache.
CACHING = ("draft_model", "eagle", "eagle3")
MAX_GROWTH_MB = 8.0
REPORT_S = 0.5  # how often the engines report
# Small pools, which the warm-up fills: later growth is not the cache.
ENVIRONMENT = {"SERVING_KV_MEMORY_MB": "64"}


@dataclass(frozen=True)
class Sample:
    """The idle server.

    rss_mb: {(process id, model): MB}. held: KV blocks and sequences by engine.
    """

    rss_mb: dict[tuple[int, str], float]
    shared_memory: dict[str, int]
    held: dict[str, float]


def sample(server: Server, limit_s: float = 8.0) -> Sample:
    """Wait until nothing is held, at most `limit_s`, and measure."""
    time.sleep(2 * REPORT_S)
    end_s = time.monotonic() + limit_s
    while any((held := _held(server)).values()) and time.monotonic() < end_s:
        time.sleep(REPORT_S)
    rss_mb = {(pid, name): psutil.Process(pid).memory_info().rss / 1e6 for pid, name in server.pids().items()}
    return Sample(rss_mb, server.shared_memory(), held)


def _held(server: Server) -> dict[str, float]:
    return {
        " ".join(key): value
        for key, value in engine_metrics(server).items()
        if key[1:] in (("kv_blocks", "held"), ("sequences",))
    }


def fill(server: Server, prompts: Sequence[Prompt]) -> None:
    """Fill the KV pools until every engine has had to evict: from then on all their memory is in use."""
    crowd, most, full = ClientPool(server.grpc_url, NUM_AT_ONCE), Counter[str](), set[str]()
    method = "+".join(method for method in CACHING if METHODS[method].drafter in server.drafters)
    for turn in range(1000):
        prefill = functools.partial(_prefill, turn, method)
        crowd.map(prefill, [prompts[(turn + i) % len(prompts)] for i in range(16)])
        cached, total = _blocks(server, "cached"), _blocks(server, "total")
        full |= {model for model, number in cached.items() if number < most[model]}
        most |= Counter(cached)
        if cached and full == {model for model, number in total.items() if number}:
            return
    raise AssertionError(f"the pools did not fill: {most}")


def _blocks(server: Server, state: str) -> dict[str, int]:
    return {key[0]: int(value) for key, value in engine_metrics(server).items() if key[1:] == ("kv_blocks", state)}


def _prefill(turn: int, method: str, client: Any, prompt: Prompt) -> None:
    """Put a prompt into all engines' caches under its own salt; a head is first called in the second step."""
    options = {"speculation": method, "max_tokens": 8, "cache_salt": f"fill {turn}"}
    list(stream(client, prompt.text, **options))


@dataclass
class Growth:
    """The measurements under traffic: before, between and after its parts."""

    samples: list[Sample] = field(default_factory=list)
    num_steps: list[int] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)

    def growth_mb(self) -> dict[str, float]:
        """Return the growth of each process since the warm-up."""
        before, after = self.samples[0].rss_mb, self.samples[-1].rss_mb
        return {f"{name} ({pid})": after[pid, name] - mb for (pid, name), mb in before.items() if (pid, name) in after}

    def faults(self) -> list[str]:
        """Return the violations of the invariant."""
        before, after = self.samples[0], self.samples[-1]
        found = [f"{name} grew by {mb:.1f} MB" for name, mb in self.growth_mb().items() if mb >= MAX_GROWTH_MB]
        found += [f"{what} = {value:g} at rest" for what, value in after.held.items() if value]
        if not after.held:
            found.append("the engines show no figures")
        if set(before.rss_mb) != set(after.rss_mb):
            found.append(f"processes changed: {sorted(before.rss_mb)}, then {sorted(after.rss_mb)}")
        if sum(after.shared_memory.values()) > sum(before.shared_memory.values()):
            found.append(f"shared memory grew: {before.shared_memory}, then {after.shared_memory}")
        return found

    def table(self) -> str:
        """Return RSS and shared memory after the warm-up and after each part of the run."""
        rows = [("steps", *map(str, self.num_steps))]
        for pid, name in self.samples[0].rss_mb:
            rows.append((f"{name}, MB", *(f"{s.rss_mb.get((pid, name), 0):.1f}" for s in self.samples)))
        rows.append(("shared memory, MB", *(f"{sum(s.shared_memory.values()) / 1e6:.1f}" for s in self.samples)))
        rows.append(("held at rest", *(f"{sum(s.held.values()):g}" for s in self.samples)))
        return "\n".join(f"{row[0]:<24}" + "".join(f"{cell:>10}" for cell in row[1:]) for row in rows)


def watch_growth(
    server: Server, warm_up: int, measured: int, num_parts: int, log: Callable[[str], None] = print
) -> Growth:
    """Fill the pools, warm up, then measure in parts."""
    prompts = [prompt for task, some in read_prompts().items() if task != "long" for prompt in some]
    fill(server, prompts)
    log("the pools are full")
    traffic, result = Traffic(server, prompts), Growth()
    for goal in [warm_up, *[measured // num_parts] * num_parts]:
        began_s = time.monotonic()
        traffic.run(goal)
        result.samples.append(sample(server))
        result.num_steps.append(traffic.num_steps)
        log(f"{traffic.num_steps} steps, the last {goal} in {time.monotonic() - began_s:.0f} s")
    result.outcomes = traffic.outcomes
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure growth on the shipped deployment; return 1 if something grew or stayed held."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--warm-up", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--parts", type=int, default=5)
    options = parser.parse_args(arguments)
    with Server(CONFIG, env=ENVIRONMENT) as server:
        result = watch_growth(
            server, options.warm_up, options.steps, options.parts, functools.partial(print, flush=True)
        )
    print(result.table())
    print(", ".join(f"{count} {kind}" for kind, count in sorted(result.outcomes.items())))
    for fault in result.faults():
        print(f"FAULT: {fault}")
    return int(bool(result.faults()))


if __name__ == "__main__":
    sys.exit(main())
