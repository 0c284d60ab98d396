"""Measured runs and their order; knows neither Triton nor models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from benchmarks.traffic import Prompt
from orchestrator.core.errors import ServingError

Item = TypeVar("Item")


class BenchError(ServingError):
    """A measurement failed or must not be reported."""


@dataclass(frozen=True)
class Run:
    """The figures of one request; decoding follows the first response, and the steps include the prefill.

    num_accepted: draft tokens in the output. num_cached_tokens: prompt tokens that the target found in its cache.
    requests_per_pass: mean number of requests that shared a pass. None: not known.
    step_ms: mean time of a step and of its parts (docs/statistics.md); empty if not known.
    tested, accepted: by depth from 1 on, steps that had a draft there after an accepted path, and how many of them
    accepted it. num_levels, num_timed_levels: levels drafted in all, and after the first step, which step_ms omits.
    histogram: steps by their number of accepted drafts, from 0 on.
    """

    ids: tuple[int, ...]
    num_steps: int
    num_accepted: int
    first_token_s: float
    decode_tokens: int
    decode_s: float
    num_drafted: int | None = None
    num_cached_tokens: int | None = None
    requests_per_pass: float | None = None
    step_ms: Mapping[str, float] = field(default_factory=dict)
    tested: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    num_levels: float = 0.0
    num_timed_levels: int = 0
    histogram: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sample:
    """A run with its runner, task, prompt and turn."""

    runner: str
    task: str
    prompt: str
    turn: int
    run: Run


class Runner(Protocol):
    """A method of the server, or a peer, that continues prompts."""

    @property
    def name(self) -> str:
        """The runner's name in the tables."""

    def fits(self, prompt: Prompt) -> bool:
        """Return whether the runner can continue this prompt."""

    def run(self, prompt: Prompt, max_tokens: int) -> Run:
        """Continue the prompt from a cold cache and measure it."""


def measure(runners: Sequence[Runner], prompts: Sequence[Prompt], turns: int, max_tokens: int) -> Iterator[Sample]:
    """Run every prompt `turns` times under every runner in turn, after one warm-up run of each.

    A runner that does not fit all the prompts is left out.
    """
    fitting = [runner for runner in runners if all(map(runner.fits, prompts))]
    for runner in fitting:
        runner.run(prompts[0], max_tokens)
    for turn in range(turns):
        for index, prompt in enumerate(prompts):
            for runner in rotated(fitting, turn + index):
                run = runner.run(prompt, max_tokens)
                yield Sample(runner.name, prompt.task, prompt.id, turn, run)


def rotated(items: Sequence[Item], by: int) -> list[Item]:
    """Return the items rotated, so that no item always follows the same neighbour."""
    start = by % len(items)
    return [*items[start:], *items[:start]]


def check_prefix_hits(samples: Sequence[Sample]) -> bool:
    """Return whether the numbers of cached prompt tokens are known; raises BenchError if they differ by method."""
    known = [sample for sample in samples if sample.run.num_cached_tokens is not None]
    for prompt in {sample.prompt for sample in known}:
        hits = {(s.runner, s.run.num_cached_tokens) for s in known if s.prompt == prompt}
        if len({cached for _, cached in hits}) > 1:
            raise BenchError(f"prompt {prompt}: the runs found different parts of it in the cache: {sorted(hits)}")
    return bool(known)
