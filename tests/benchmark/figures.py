"""Samples to figures: rates over all prompts, their spread between prompts, ratios with an interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from clients.generate import ratio
from tests.benchmark.samples import BenchError, Run, Sample

FloatArray = npt.NDArray[np.float64]
NUM_RESAMPLES = 10_000
LEVEL = 95


@dataclass(frozen=True)
class Spread:
    """A figure over all prompts, and the quartiles and the median of the prompts' own."""

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
    """One runner's figures on one task; None where the runner does not tell. speed_up: over the base's decoding."""

    task: str
    runner: str
    num_runs: int
    num_same_text: int
    tokens_per_s: Spread
    first_token_s: Spread
    acceptance_length: float
    acceptance_length_without_bonus: float
    draft_acceptance_rate: float | None
    speed_up: Ratio


def rows(samples: Sequence[Sample], base: str) -> list[Row]:
    """Return one row per task and runner, in the order of the samples."""
    keys = dict.fromkeys((sample.task, sample.runner) for sample in samples)
    return [_row(samples, task, runner, base) for task, runner in keys]


def _row(samples: Sequence[Sample], task: str, runner: str, base: str) -> Row:
    mine = [s for s in samples if (s.task, s.runner) == (task, runner)]
    texts = {s.prompt: s.run.ids for s in samples if (s.task, s.runner) == (task, base)}
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
        first_token_s=_first_tokens(mine),
        acceptance_length=ratio(tokens, steps),
        acceptance_length_without_bonus=ratio(accepted, steps),
        draft_acceptance_rate=ratio(accepted, known) if known else None,
        speed_up=compare_rates(samples, task, runner, base),
    )


def compare_rates(samples: Sequence[Sample], task: str, runner: str, base: str) -> Ratio:
    """Return runner's decoding rate over base's: of all prompts together, with a bootstrap interval over prompts.

    A prompt that ended with the first response has no decoding rate and is left out.
    """
    ours, theirs = (totals([s for s in samples if (s.task, s.runner) == (task, name)]) for name in (runner, base))
    timed = [key for key in ours if key in theirs and ours[key][1] and theirs[key][1]]
    if not timed:
        raise BenchError(f"no text of task {task} is longer than one step; raise --max-tokens")
    a, b = np.array([ours[key] for key in timed]), np.array([theirs[key] for key in timed])
    low, high = interval(a, b)
    overall = _rate_ratio(a.sum(axis=0), b.sum(axis=0))
    return Ratio(float(overall), low, high, _quartiles(_rate_ratio(a.T, b.T)))


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
