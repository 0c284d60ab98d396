"""The figures as a Markdown page: each experiment with the paper's figures beside ours, and matrices over all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.paper.experiments import Experiment, Setting
from benchmarks.paper.figures import MAX_ACCEPTED, Summary, summary
from benchmarks.paper.measuring import Measured
from benchmarks.report import ratio_text
from benchmarks.samples import Sample

INTRODUCTION = """# The papers' experiments, on this server

Made by `make paper`; how to read it and how to repeat it: [experiments](../experiments.md).

**Two definitions of acceptance length.** *Tokens a step* = output tokens ÷ target passes: the target's own token counts
(EAGLE's τ, Leviathan's E[#tokens], vLLM's mean acceptance length). *Accepted a step* = accepted drafts ÷ target passes:
it does not. The first is the second plus 1, less what a stop or the last token cuts off; both count the pass that reads
the prompt. α = accepted ÷ tested levels; γ = levels drafted a step; c = time of one drafted level ÷ time of a plain
step; predicted gain = (1 − α^(γ+1)) ÷ ((1 − α)(γc + 1)). *Same text*: prompts whose text is that of plain decoding;
under `rejection` above temperature 0 only the distribution is the same."""
COLUMNS = (
    "setting", "tokens a step (95 %)", "accepted a step", "α", "γ", "c", "predicted", "γ* (gain)", "measured (95 %)",
    "slower prompts", "same text",
)  # fmt: skip


def page(experiments: Sequence[Experiment], measured: Measured, about: Mapping[str, Any]) -> str:
    """Return the page; settings that the server could not run are left out and named."""
    parts = [INTRODUCTION, _conditions(about, measured)]
    for experiment in experiments:
        parts += _experiment(experiment, measured)
    parts += _matrices(measured)
    return "\n\n".join(parts) + "\n"


def _conditions(about: Mapping[str, Any], measured: Measured) -> str:
    conversations = {place.conversation.id for place in measured.places.values()}
    named = "; ".join(f"{name} {value}" for name, value in about.items() if name != "arguments")
    return (
        f"Conditions: {len(conversations)} conversations with {len(measured.places)} turns in all, settings in turn, "
        f"cold cache each. {named}."
    )


def _experiment(experiment: Experiment, measured: Measured) -> Iterator[str]:
    ran = [each for each in experiment.settings if each in measured.settings]
    left_out = [each.name for each in experiment.settings if each not in ran]
    yield f"## {experiment.title}"
    if ran:
        yield summary_table([summary(measured, each) for each in ran])
    if experiment.by_turn and ran:
        yield _turn_table(measured, ran)
    if left_out:
        yield f"Not run, because the server lacks the drafter: {'; '.join(left_out)}."
    if experiment.published:
        lines = ["| the paper reports | | where |", "|---|---|---|"]
        lines += [f"| {each.what} | {each.figure} | {each.source} |" for each in experiment.published]
        yield "\n".join(lines)
    yield f"Why ours differ. {experiment.why}"


def summary_table(summaries: Sequence[Summary]) -> str:
    """Return a Markdown table of settings."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|---|{'---:|' * (len(COLUMNS) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(_cells(each))} |" for each in summaries)])


def _cells(each: Summary) -> list[str]:
    low, high = each.acceptance_interval
    return [
        each.setting,
        f"{each.acceptance_length:.2f} ({low:.2f}–{high:.2f})",
        f"{each.accepted_per_step:.2f}",
        f"{each.alpha:.2f}",
        f"{each.gamma:.1f}",
        f"{each.c:.3f}",
        f"{each.predicted:.2f} ×",
        f"{each.best_gamma} ({each.best_gain:.2f} ×)",
        ratio_text(each.speed_up) if each.speed_up else "–",
        f"{100 * each.slower:.0f} %",
        f"{each.num_same_text}/{each.num_prompts}",
    ]


def _turn_table(measured: Measured, settings: Sequence[Setting]) -> str:
    """Return a Markdown table by task and turn, with the quartiles of the prompts' own speed-ups."""
    lines = ["| task | turn | setting | prompts | tokens a step | measured (95 %) | quartiles | slower prompts |"]
    lines.append("|---|---:|---|---:|---:|---:|---|---:|")
    keys = dict.fromkeys((place.conversation.task, place.number) for place in measured.places.values())
    for task, number in sorted(keys):
        for each in settings:
            found = summary(measured, each, _of(measured, task, number))
            quartiles = " / ".join(f"{x:.2f}" for x in found.speed_up.quartiles) if found.speed_up else "–"
            cells = [
                task, str(number), each.name, str(found.num_prompts), f"{found.acceptance_length:.2f}",
                ratio_text(found.speed_up) if found.speed_up else "–", quartiles, f"{100 * found.slower:.0f} %",
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _of(measured: Measured, task: str, number: int) -> Callable[[Sample], bool]:
    def is_of(sample: Sample) -> bool:
        place = measured.places[sample.prompt]
        return (place.conversation.task, place.number) == (task, number)

    return is_of


def _matrices(measured: Measured) -> Iterator[str]:
    summaries = [summary(measured, each) for each in measured.settings if each != each.base]
    yield "## Category × setting"
    yield "Tokens a step, and in brackets the measured speed-up over plain decoding."
    yield _category_table(measured)
    yield "## Acceptance by depth"
    yield "Accepted ÷ tested at depth 1, 2, …: steps whose accepted path reached the depth above and had a draft here."
    depths = max((len(each.by_depth) for each in summaries), default=0)
    rows = [[f"{share:.2f}" for share in each.by_depth] for each in summaries]
    yield _wide_table([str(depth + 1) for depth in range(depths)], summaries, rows)
    yield "## Accepted drafts a step"
    yield "Share of the steps with so many accepted drafts, the target's own token not counted."
    counts = max((len(each.histogram) for each in summaries), default=0)
    heads = [f"{count}{' or more' if count == MAX_ACCEPTED else ''}" for count in range(counts)]
    rows = [[f"{100 * share:.0f} %" for share in each.histogram] for each in summaries]
    yield _wide_table(heads, summaries, rows)


def _wide_table(heads: Sequence[str], summaries: Sequence[Summary], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| setting | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
    for each, row in zip(summaries, rows, strict=True):
        filled = [*row, *[""] * (len(heads) - len(row))]
        lines.append(f"| {each.setting} | {' | '.join(filled)} |")
    return "\n".join(lines)


def _category_table(measured: Measured) -> str:
    categories = list(dict.fromkeys(place.conversation.category for place in measured.places.values()))
    lines = [f"| setting | {' | '.join(categories)} |", f"|---|{'---:|' * len(categories)}"]
    for each in measured.settings:
        if each == each.base:
            continue
        cells = []
        for category in categories:
            found = summary(measured, each, _of_category(measured, category))
            gain = f" ({found.speed_up.overall:.2f} ×)" if found.speed_up else ""
            cells.append(f"{found.acceptance_length:.2f}{gain}")
        lines.append(f"| {each.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _of_category(measured: Measured, category: str) -> Callable[[Sample], bool]:
    return lambda sample: measured.places[sample.prompt].conversation.category == category
