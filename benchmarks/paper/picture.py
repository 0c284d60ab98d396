"""The experiments as a picture: tokens a step and speed-up, acceptance by depth, accepted drafts a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.paper.figures import Summary
from benchmarks.picture import STYLE

#: Most settings in one panel of lines; more would be hard to distinguish.
MAX_LINES = 10


def draw(summaries: Sequence[Summary], path: Path) -> None:
    """Write the picture as SVG."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 4 + 0.17 * len(summaries)), layout="constrained")
        bars, depths, histogram = figure.subplots(1, 3, width_ratios=(2, 1.3, 1.3))
        _draw_bars(bars, summaries)
        longest = sorted(summaries, key=lambda each: -len(each.by_depth))[:MAX_LINES]
        for each in longest:
            depths.plot(range(1, len(each.by_depth) + 1), each.by_depth, marker="o", markersize=3, label=each.setting)
            histogram.plot(range(len(each.histogram)), each.histogram, marker="o", markersize=3)
        depths.set(xlabel="depth", ylabel="accepted ÷ tested", ylim=(0, 1))
        histogram.set(xlabel="accepted drafts a step", ylabel="share of the steps", ylim=(0, 1))
        for axes in (bars, depths, histogram):
            axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=7)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _draw_bars(axes: Axes, summaries: Sequence[Summary]) -> None:
    """Draw tokens a step, without a label for the legend, and the measured speed-up as a mark."""
    places = np.arange(len(summaries))
    axes.barh(places, [each.acceptance_length for each in summaries], color="0.75")
    timed = [(place, each.speed_up.overall) for place, each in zip(places, summaries, strict=True) if each.speed_up]
    axes.plot([gain for _, gain in timed], [place for place, _ in timed], "k|", markersize=8)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(places, [each.setting for each in summaries], fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("bar: tokens a step; mark: speed-up over plain decoding")
