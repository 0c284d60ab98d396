"""The server's methods as runners, with one request or many at once."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import tritonclient.grpc as grpcclient

from benchmarks.samples import Run, rotated
from benchmarks.traffic import Prompt
from clients.generate import Generation, generate

START_LIMIT_S = 30.0


@dataclass(frozen=True)
class Method:
    """A drafting method, with the JSON of its parameters; implements `Runner` over a client."""

    name: str
    client: Any = None
    config: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, client: Any, options: Mapping[str, Any]) -> Method:
        """Read `method` or `method:{"parameter": value}`."""
        _, _, config = text.partition(":")
        return cls(text, client, config or None, options)

    @property
    def method(self) -> str:
        """The method's name without parameters."""
        return self.name.partition(":")[0]

    def fits(self, prompt: Prompt) -> bool:
        """Return whether the prompt has the text that the method needs."""
        return self.method != "predicted" or bool(prompt.prediction)

    def generate(self, client: Any, prompt: Prompt, max_tokens: int) -> Generation:
        """Continue a prompt from a cold cache: no other request has the same salt."""
        options = {**self.options, "speculation": self.method, "speculation_config": self.config}
        if self.method == "predicted":
            options["draft_text"] = prompt.prediction
        salt = secrets.token_hex(8)
        return generate(client, prompt.text, max_tokens=max_tokens, cache_salt=salt, return_stats=True, **options)

    def run(self, prompt: Prompt, max_tokens: int) -> Run:
        """Continue a prompt and measure it."""
        return to_run(self.generate(self.client, prompt, max_tokens))


def to_run(done: Generation) -> Run:
    """Return the figures of a request as its client measured them."""
    numbers = done.numbers()
    stats = json.loads(numbers.get("stats") or "{}")
    depths, model = stats.get("depths", {}), stats.get("model", {})
    lengths = [length for chunk in done.chunks for length in chunk.step_lengths]
    return Run(
        ids=tuple(done.ids),
        num_steps=numbers["num_steps"],
        num_accepted=numbers["total_accepted_draft_tokens"],
        first_token_s=numbers["first_token_s"],
        decode_tokens=numbers["decode_tokens"],
        decode_s=numbers["decode_s"],
        num_drafted=numbers["total_draft_tokens"],
        num_cached_tokens=stats.get("num_cached_tokens"),
        requests_per_pass=stats.get("requests_per_pass"),
        step_ms=stats.get("step_ms", {}),
        tested=tuple(depths.get("tested", ())),
        accepted=tuple(depths.get("accepted", ())),
        num_levels=model.get("gamma", 0.0) * numbers["num_steps"],
        num_timed_levels=model.get("timed_levels", 0),
        histogram=tuple(Counter(length - 1 for length in lengths)[n] for n in range(max(lengths, default=0))),
    )


@dataclass(frozen=True)
class ConcurrentRun:
    """Many requests at once under one method, timed from when all are sent to when the last ends.

    requests_per_pass: requests per pass of the target as the engine counts them, or None if it is not known.
    seen_per_pass: the same as the requests report it, which counts fuller passes more often.
    """

    method: str
    wall_s: float
    runs: tuple[Run, ...]
    requests_per_pass: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all requests per second of wall time, prefill included."""
        return sum(len(run.ids) for run in self.runs) / self.wall_s

    @property
    def seen_per_pass(self) -> float | None:
        """Mean number of requests in a pass, averaged over the steps of all requests."""
        known = [(run.requests_per_pass, run.num_steps) for run in self.runs if run.requests_per_pass is not None]
        total = sum(steps for _, steps in known)
        return sum(mean * steps for mean, steps in known) / total if total else None


class Passes(NamedTuple):
    """The target's counters: its passes, and the requests in them."""

    passes: float
    requests: float


Count = Callable[[], Passes | None]


def measure_concurrent(
    methods: Sequence[Method], url: str, prompts: Sequence[Prompt], turns: int, max_tokens: int, count: Count
) -> list[ConcurrentRun]:
    """Send all prompts at once under each method in turn; the first turn is a warm-up."""
    measured = []
    for turn in range(turns + 1):
        for method in rotated(methods, turn):
            before = count()
            run = run_concurrently(method, url, prompts, max_tokens)
            after = count()
            if before and after and after.passes > before.passes:
                shared = (after.requests - before.requests) / (after.passes - before.passes)
                run = replace(run, requests_per_pass=shared)
            measured += [run] if turn else []
    return measured


def run_concurrently(method: Method, url: str, prompts: Sequence[Prompt], max_tokens: int) -> ConcurrentRun:
    """Continue all prompts at once, each over its own stream."""
    start = threading.Barrier(len(prompts) + 1)

    def one(prompt: Prompt) -> Run:
        with grpcclient.InferenceServerClient(url) as client:
            start.wait(START_LIMIT_S)
            return to_run(method.generate(client, prompt, max_tokens))

    with ThreadPoolExecutor(len(prompts)) as pool:
        pending = [pool.submit(one, prompt) for prompt in prompts]
        start.wait(START_LIMIT_S)
        began_s = time.perf_counter()
        runs = tuple(answer.result() for answer in pending)
        return ConcurrentRun(method.name, time.perf_counter() - began_s, runs)
