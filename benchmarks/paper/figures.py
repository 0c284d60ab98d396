"""Figures of a setting over its samples: acceptance by both definitions, Leviathan's quantities, spread and ratios."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks import figures
from benchmarks.figures import Ratio
from benchmarks.paper.experiments import Setting
from benchmarks.paper.measuring import Measured
from benchmarks.samples import BenchError, Sample
from clients.generate import ratio
from orchestrator.server.statistics import best_gamma, walltime_gain

#: Depths beyond MAX_DEPTH are left out; steps with more accepted drafts than MAX_ACCEPTED count as having that many.
MAX_DEPTH, MAX_ACCEPTED = 8, 8


@dataclass(frozen=True)
class Summary:
    """One setting's figures over some prompts.

    acceptance_length: tokens ÷ steps, bonus included. accepted_per_step: accepted drafts ÷ steps.
    alpha: accepted ÷ tested levels. gamma: levels drafted a step. c: time of a drafted level ÷ a plain step.
    predicted: the walltime gain that follows from these three. best_gamma, best_gain: the γ that maximises it.
    speed_up: measured, over plain decoding. slower: share of prompts with a speed-up below 1.
    by_depth: conditional acceptance at depth 1, 2, …; histogram: share of the steps with 0, 1, … accepted drafts.
    """

    setting: str
    num_prompts: int
    acceptance_length: float
    acceptance_interval: tuple[float, float]
    accepted_per_step: float
    alpha: float
    gamma: float
    c: float
    predicted: float
    best_gamma: int
    best_gain: float
    speed_up: Ratio | None
    slower: float
    num_same_text: int
    by_depth: tuple[float, ...]
    histogram: tuple[float, ...]


def summary(measured: Measured, setting: Setting, keep: Callable[[Sample], bool] = lambda sample: True) -> Summary:
    """Return a setting's figures over the samples that `keep` chooses."""
    mine, plain = (
        [sample for sample in measured.samples if sample.runner == name and keep(sample)]
        for name in (setting.name, setting.base.name)
    )
    runs = [sample.run for sample in mine]
    tokens, steps = sum(len(run.ids) for run in runs), sum(run.num_steps for run in runs)
    tested, accepted = (sums([getattr(run, name) for run in runs]) for name in ("tested", "accepted"))
    alpha, gamma = ratio(sum(accepted), sum(tested)), ratio(sum(run.num_levels for run in runs), steps)
    c = draft_cost(mine, plain)
    best = best_gamma(alpha, c)
    texts = {sample.prompt: sample.run.ids for sample in plain}
    return Summary(
        setting=setting.name,
        num_prompts=len({sample.prompt for sample in mine}),
        acceptance_length=ratio(tokens, steps),
        acceptance_interval=figures.acceptance_interval(mine),
        accepted_per_step=ratio(sum(run.num_accepted for run in runs), steps),
        alpha=alpha,
        gamma=gamma,
        c=c,
        predicted=walltime_gain(alpha, gamma, c),
        best_gamma=best,
        best_gain=walltime_gain(alpha, best, c),
        speed_up=_speed_up(mine, plain, setting),
        slower=slower_share(mine, plain),
        num_same_text=sum(sample.run.ids == texts.get(sample.prompt) for sample in mine),
        by_depth=tuple(ratio(a, t) for a, t in zip(accepted, tested, strict=True))[:MAX_DEPTH],
        histogram=shares(sums([run.histogram for run in runs])),
    )


def sums(rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the sums by column of rows of different lengths."""
    length = max(map(len, rows), default=0)
    return [sum(row[place] for row in rows if place < len(row)) for place in range(length)]


def shares(counts: Sequence[int]) -> tuple[float, ...]:
    """Return the counts as shares of their sum, those from MAX_ACCEPTED on added up in the last place."""
    kept = [*counts[:MAX_ACCEPTED], sum(counts[MAX_ACCEPTED:])] if len(counts) > MAX_ACCEPTED else list(counts)
    return tuple(ratio(count, sum(counts)) for count in kept)


def draft_cost(mine: Sequence[Sample], plain: Sequence[Sample]) -> float:
    """Return c: the time of one drafted level ÷ the time of a plain step, as the papers define it."""
    levels = sum(sample.run.num_timed_levels for sample in mine)
    drafting = sum(sample.run.step_ms.get("draft", 0.0) * (sample.run.num_steps - 1) for sample in mine)
    decoding = 1e3 * sum(sample.run.decode_s for sample in plain)
    return ratio(ratio(drafting, levels), ratio(decoding, sum(sample.run.num_steps - 1 for sample in plain)))


def slower_share(mine: Sequence[Sample], plain: Sequence[Sample]) -> float:
    """Return the share of the prompts whose decoding rate is below plain decoding's."""
    ours, theirs = figures.totals(mine), figures.totals(plain)
    timed = [key for key in ours if key in theirs and ours[key][1] and theirs[key][1]]
    return ratio(sum(ratio(*ours[key]) < ratio(*theirs[key]) for key in timed), len(timed))


def _speed_up(mine: Sequence[Sample], plain: Sequence[Sample], setting: Setting) -> Ratio | None:
    if setting == setting.base or not mine or not plain:
        return None
    samples = [replace(sample, task=figures.ALL) for sample in [*mine, *plain]]
    try:
        return figures.compare_rates(samples, figures.ALL, setting.name, setting.base.name)
    except BenchError:  # every text ended with its first response
        return None
