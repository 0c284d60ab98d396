"""Figures from samples: rates over all prompts, their spread between prompts, and ratios with an interval."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.samples import BenchError, Run, Sample
from clients.generate import ratio
from orchestrator.core.arrays import FloatArray

NUM_RESAMPLES = 10_000
LEVEL = 95
#: What may follow a peer's name if it decodes plainly.
PLAIN = ("", "float32", "float16", "bfloat16")
#: The task of a row over all tasks.
ALL = "all"


@dataclass(frozen=True)
class Spread:
    """A figure over all prompts, and the quartiles of single prompts' figures (of single runs' for first_token_s)."""

    overall: float
    quartiles: tuple[float, ...]


@dataclass(frozen=True)
class Ratio:
    """A ratio of totals, its bootstrap interval over prompts, and the quartiles of the prompts' own ratios."""

    overall: float
    low: float
    high: float
    quartiles: tuple[float, ...]


@dataclass(frozen=True)
class Row:
    """One runner's figures on one task, None for a figure that the runner does not report.

    step_s: seconds of decoding per step; the first step, whose pass reads the prompt, is left out.
    speed_up: ratio of decoding rates to the base. share_slower: of the prompts, those slower than the base.
    acceptance_interval: of the length with the bonus token, by bootstrap over prompts; the length without it is one
    less, except for texts that end within a step.
    """

    task: str
    runner: str
    num_runs: int
    num_same_text: int
    tokens_per_s: Spread
    step_s: float
    first_token_s: Spread
    acceptance_length: float
    acceptance_interval: tuple[float, float]
    acceptance_length_without_bonus: float
    draft_acceptance_rate: float | None
    speed_up: Ratio
    share_slower: float


@dataclass(frozen=True)
class Comparison:
    """A runner's decoding rate over another's on one task."""

    task: str
    runner: str
    peer: str
    ratio: Ratio


def rows(samples: Sequence[Sample], base: str) -> list[Row]:
    """Return one row per task and runner, in the order of the samples; with several tasks, also over all."""
    keys = dict.fromkeys((sample.task, sample.runner) for sample in samples)
    tasks, runners = (dict.fromkeys(key[place] for key in keys) for place in (0, 1))
    everywhere = [(ALL, name) for name in runners if all((task, name) in keys for task in tasks)]
    return [_row(samples, *key, base) for key in [*keys, *(everywhere if len(tasks) > 1 else [])]]


def _of(samples: Sequence[Sample], task: str, runner: str) -> list[Sample]:
    return [s for s in samples if s.runner == runner and task in (s.task, ALL)]


def _row(samples: Sequence[Sample], task: str, runner: str, base: str) -> Row:
    mine = _of(samples, task, runner)
    texts = {s.prompt: s.run.ids for s in _of(samples, task, base)}
    runs = [s.run for s in mine]
    tokens, steps = sum(len(run.ids) for run in runs), sum(run.num_steps for run in runs)
    accepted, drafted = sum(run.num_accepted for run in runs), [run.num_drafted for run in runs]
    known = sum(n for n in drafted if n is not None)
    return Row(
        task=task,
        runner=runner,
        num_runs=len(runs),
        num_same_text=sum(s.run.ids == texts.get(s.prompt) for s in mine),
        tokens_per_s=_rates(mine),
        step_s=ratio(sum(run.decode_s for run in runs), steps - len(runs)),
        first_token_s=_first_tokens(mine),
        acceptance_length=ratio(tokens, steps),
        acceptance_interval=acceptance_interval(mine),
        acceptance_length_without_bonus=ratio(accepted, steps),
        draft_acceptance_rate=ratio(accepted, known) if known else None,
        speed_up=compare_rates(samples, task, runner, base),
        share_slower=share_slower(mine, _of(samples, task, base)),
    )


def share_slower(samples: Sequence[Sample], base: Sequence[Sample]) -> float:
    """Return the share of prompts that decode more slowly than under the base."""
    ours, theirs = totals(samples), totals(base)
    timed = [key for key in ours if key in theirs and ours[key][1] and theirs[key][1]]
    return ratio(sum(ratio(*ours[key]) < ratio(*theirs[key]) for key in timed), len(timed))


def acceptance_interval(samples: Sequence[Sample]) -> tuple[float, float]:
    """Return the bootstrap interval over prompts of tokens per step, all runs of a prompt together."""
    found: dict[str, list[int]] = {}
    for sample in samples:
        sums = found.setdefault(sample.prompt, [0, 0])
        sums[0] += len(sample.run.ids)
        sums[1] += sample.run.num_steps
    pairs = np.array(list(found.values()), np.float64)
    return interval(pairs, np.ones_like(pairs))


def compare_rates(samples: Sequence[Sample], task: str, runner: str, base: str) -> Ratio:
    """Return runner's decoding rate over base's: of all prompts together, with a bootstrap interval over prompts.

    A prompt that ended with the first response has no decoding rate and is left out.
    """
    ours, theirs = (totals(_of(samples, task, name)) for name in (runner, base))
    timed = [key for key in ours if key in theirs and ours[key][1] and theirs[key][1]]
    if not timed:
        raise BenchError(f"no text of task {task} is longer than one step; raise --max-tokens")
    a, b = np.array([ours[key] for key in timed]), np.array([theirs[key] for key in timed])
    low, high = interval(a, b)
    overall = _rate_ratio(a.sum(axis=0), b.sum(axis=0))
    return Ratio(float(overall), low, high, _quartiles(_rate_ratio(a.T, b.T)))


def compare_with_peers(
    samples: Sequence[Sample], base: str, methods: Sequence[str], peers: Sequence[str]
) -> list[Comparison]:
    """Compare plain decoding with each peer's plain decoding, and the fastest method with each peer's fastest.

    base: the method that decodes plainly. peers: names of peers; the names of a peer's runners begin with it; that of
    a plain one has nothing but a dtype after it.
    """
    tasks = dict.fromkeys(sample.task for sample in samples)
    runners = dict.fromkeys(sample.runner for sample in samples)
    found = []
    for task, peer in itertools.product(tasks, peers):
        theirs = [name for name in runners if name.startswith(peer)]
        plain = [name for name in theirs if name.removeprefix(peer).strip() in PLAIN]
        for ours, others in (([base], plain), (methods, theirs)):
            mine, best = (_fastest(samples, task, names) for names in (ours, others))
            found.append(Comparison(task, mine, best, compare_rates(samples, task, mine, best)))
    return found


def _fastest(samples: Sequence[Sample], task: str, runners: Sequence[str]) -> str:
    """Return the runner with the highest decoding rate over all prompts of a task."""
    measured = [name for name in runners if _of(samples, task, name)]
    return max(measured, key=lambda name: _rates(_of(samples, task, name)).overall)


def totals(samples: Sequence[Sample]) -> dict[str, tuple[int, float]]:
    """Return decoded tokens and decoding seconds of each prompt, all its runs together."""
    found: dict[str, tuple[int, float]] = {}
    for sample in samples:
        tokens, seconds = found.get(sample.prompt, (0, 0.0))
        found[sample.prompt] = (tokens + sample.run.decode_tokens, seconds + sample.run.decode_s)
    return found


def interval(a: FloatArray, b: FloatArray) -> tuple[float, float]:
    """Return the bootstrap interval of the ratio of a's rate to b's; a, b: (prompts, 2), tokens and seconds.

    Prompts are drawn with replacement, the same ones for both; the seed is fixed.
    """
    drawn = np.random.default_rng(0).integers(len(a), size=(NUM_RESAMPLES, len(a)))
    ratios = _rate_ratio(a[drawn].sum(axis=1).T, b[drawn].sum(axis=1).T)
    tail = (100 - LEVEL) / 2
    low, high = np.percentile(ratios, (tail, 100 - tail))
    return float(low), float(high)


def _rate_ratio(a: FloatArray, b: FloatArray) -> FloatArray:
    result: FloatArray = np.asarray((a[0] / a[1]) / (b[0] / b[1]))
    return result


def _rates(samples: Sequence[Sample]) -> Spread:
    per_prompt = list(totals(samples).values())
    overall = ratio(sum(tokens for tokens, _ in per_prompt), sum(seconds for _, seconds in per_prompt))
    return Spread(overall, _quartiles(np.array([ratio(*total) for total in per_prompt])))


def _first_tokens(samples: Sequence[Sample]) -> Spread:
    runs: list[Run] = [sample.run for sample in samples]
    times_s = np.array([run.first_token_s for run in runs])
    return Spread(float(times_s.mean()), _quartiles(times_s))


def _quartiles(values: FloatArray) -> tuple[float, ...]:
    return tuple(float(x) for x in np.percentile(values, (25, 50, 75)))
