"""The speed-ups as a picture: one group of bars per task, with the 95 % interval over prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.figures import Row

# Text is not converted to paths, and the same figures give the same file.
STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "bench", "font.size": 9}
GROUP_WIDTH = 0.86


def draw(rows: Sequence[Row], base: str, path: Path) -> None:
    """Write the picture of all runners but the base as SVG."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        axes = figure.subplots()
        _bars(axes, [row for row in rows if row.runner != base])
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_ylabel(f"speed-up over {base}")
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside right upper", frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _bars(axes: Axes, rows: Sequence[Row]) -> None:
    tasks, runners = (list(dict.fromkeys(values)) for values in ([r.task for r in rows], [r.runner for r in rows]))
    colours = [matplotlib.colormaps["tab20"](number) for number in range(20)]
    width = GROUP_WIDTH / len(runners)
    for number, runner in enumerate(runners):
        mine = [row for row in rows if row.runner == runner]
        places = [tasks.index(row.task) + (number - (len(runners) - 1) / 2) * width for row in mine]
        heights = [row.speed_up.overall for row in mine]
        ends = [
            [row.speed_up.overall - row.speed_up.low for row in mine],
            [row.speed_up.high - row.speed_up.overall for row in mine],
        ]
        style = {"elinewidth": 0.7, "ecolor": "0.35"}
        axes.bar(places, heights, width, yerr=ends, color=colours[number % len(colours)], label=runner, error_kw=style)
    axes.set_xticks(range(len(tasks)), tasks)
