"""Measured runs and the order in which they are taken; knows neither Triton nor models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from benchmarks.traffic import Prompt

Item = TypeVar("Item")


class BenchError(Exception):
    """A measurement that must not be reported."""


@dataclass(frozen=True)
class Run:
    """One request, measured. Decoding is what follows the first response; the steps count the prefill's too.

    num_accepted: draft tokens in the output. num_cached_tokens: tokens of the prompt that the target found in its
    cache. requests_per_pass: how many requests shared a pass, on average. None: not known.
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


@dataclass(frozen=True)
class Sample:
    """A run and what it was a run of."""

    runner: str
    task: str
    prompt: str
    turn: int
    run: Run


class Runner(Protocol):
    """Something that continues a prompt: a method of the server, or a peer."""

    @property
    def name(self) -> str:
        """What the tables call it."""

    def fits(self, prompt: Prompt) -> bool:
        """Say whether there is all that it needs to continue this prompt."""

    def run(self, prompt: Prompt, max_tokens: int) -> Run:
        """Continue the prompt from a cold cache and measure it."""


def measure(runners: Sequence[Runner], prompts: Sequence[Prompt], turns: int, max_tokens: int) -> Iterator[Sample]:
    """Run every prompt `turns` times under every runner, by turns, after one run of each that is not counted.

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
    """Return the items with another one first, so that none always follows the same neighbour."""
    start = by % len(items)
    return [*items[start:], *items[:start]]


def check_prefix_hits(samples: Sequence[Sample]) -> bool:
    """Return whether the cached prompt tokens are known; raises BenchError when methods found different ones."""
    known = [sample for sample in samples if sample.run.num_cached_tokens is not None]
    for prompt in {sample.prompt for sample in known}:
        hits = {(s.runner, s.run.num_cached_tokens) for s in known if s.prompt == prompt}
        if len({cached for _, cached in hits}) > 1:
            raise BenchError(f"prompt {prompt}: the runs found different parts of it in the cache: {sorted(hits)}")
    return bool(known)
