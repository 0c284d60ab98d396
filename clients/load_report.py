"""The report of `make load`: figures of each method with each number of users, and where speculation stops paying."""

from __future__ import annotations

import html
import io
import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BASE = "none"


class Cell(NamedTuple):
    """One method with one number of users.

    Tokens count if they came within the window, streams if they began in it and succeeded; times are medians and 95th
    percentiles of streams (of single gaps for inter_chunk_ms) in ms. num_different: texts unlike the first with the
    same prompt and seed; they are among the errors.
    """

    method: str
    users: int
    window_s: float
    num_streams: int
    num_errors: int
    num_different: int
    tokens_per_s: float
    acceptance_length: float
    tokens_per_chunk: float
    first_token_ms: tuple[float, float]
    inter_token_ms: tuple[float, float]
    inter_chunk_ms: tuple[float, float]
    e2e_ms: tuple[float, float]

    def line(self) -> str:
        """Return the cell in one line."""
        return (
            f"{self.method:<24} {self.users:>4} users {self.tokens_per_s:>8.1f} tokens/s, acceptance length "
            f"{self.acceptance_length:.2f}, first token {self.first_token_ms[0]:.0f} ms, "
            f"{self.num_streams} streams, {self.num_errors} errors"
        )


def median_of(runs: Sequence[Cell]) -> Cell:
    """Return the run with the median tokens/s (of two, the slower) or, if any had errors, the one with most."""
    worst = max(runs, key=lambda run: run.num_errors)
    return worst if worst.num_errors else sorted(runs, key=lambda run: run.tokens_per_s)[(len(runs) - 1) // 2]


def cell_of(records: Sequence[Mapping[str, Any]], method: str, users: int, warm_up_s: float, seconds: float) -> Cell:
    """Return the figures of a run from its records.

    The window starts `warm_up_s`, and ends `seconds`, after the first request was sent.
    """
    sent_s = min(record["began_s"] for record in records)
    low_s, high_s = sent_s + warm_up_s, sent_s + seconds
    good = [record for record in records if not record["error"]]
    counted = [record for record in good if low_s <= record["began_s"] < high_s]
    tokens = sum(_tokens_within(record, low_s, high_s) for record in good)
    gaps = [gap for record in counted for gap in _gaps(record["times"])]
    num_tokens = sum(record["num_tokens"] for record in counted)
    return Cell(
        method,
        users,
        window_s=seconds - warm_up_s,
        num_streams=len(counted),
        num_errors=len(records) - len(good),
        num_different=sum("another text" in record["error"] for record in records),
        tokens_per_s=tokens / (high_s - low_s),
        acceptance_length=num_tokens / max(sum(record["num_steps"] for record in counted), 1),
        tokens_per_chunk=num_tokens / max(sum(len(record["times"]) for record in counted), 1),
        first_token_ms=_quantiles(1e3 * record["times"][0] for record in counted),
        inter_token_ms=_quantiles(
            1e3 * (record["times"][-1] - record["times"][0]) / (record["num_tokens"] - 1)
            for record in counted
            if record["num_tokens"] > 1
        ),
        inter_chunk_ms=_quantiles(1e3 * gap for gap in gaps),
        e2e_ms=_quantiles(1e3 * record["times"][-1] for record in counted),
    )


def _tokens_within(record: Mapping[str, Any], low_s: float, high_s: float) -> float:
    """Return how many of a stream's tokens came within the window, assuming chunks of equal size."""
    times: list[float] = record["times"]
    within = sum(low_s <= record["began_s"] + at_s < high_s for at_s in times)
    return float(record["num_tokens"] * within / len(times))


def _gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def _quantiles(values: Iterable[float]) -> tuple[float, float]:
    """Return median and 95th percentile; zeros if there are no values."""
    found = sorted(values)
    if not found:
        return 0.0, 0.0
    return statistics.median(found), found[min(round(0.95 * len(found)), len(found) - 1)]


Grid = Mapping[tuple[str, int], Cell]


def speed_ups(cells: Sequence[Cell]) -> dict[str, dict[int, float]]:
    """Return each method's tokens/s ÷ those of BASE by number of users, where both were measured."""
    base = {cell.users: cell.tokens_per_s for cell in cells if cell.method == BASE and cell.tokens_per_s}
    found: dict[str, dict[int, float]] = {}
    for cell in sorted(cells, key=lambda cell: cell.users):
        if cell.method != BASE and cell.users in base:
            found.setdefault(cell.method, {})[cell.users] = cell.tokens_per_s / base[cell.users]
    return found


def stops_paying(by_users: Mapping[int, float]) -> str:
    """Return where a method's speed-up falls below 1: between which numbers of users, or that it does not."""
    users = sorted(by_users)
    if by_users[users[0]] < 1:
        return f"does not pay at {users[0]}"
    for earlier, later in itertools.pairwise(users):
        if by_users[later] < 1:
            return f"between {earlier} and {later}"
    return f"pays at {users[-1]} still"


def to_markdown(cells: Sequence[Cell]) -> str:
    """Return the figures as a table: tokens/s of all users and the speed-up, by method and users."""
    numbers = sorted({cell.users for cell in cells})
    grid: Grid = {(cell.method, cell.users): cell for cell in cells}
    methods = list(dict.fromkeys(cell.method for cell in cells))
    gains = speed_ups(cells)
    lines = ["| method | acceptance length |" + "".join(f" {n} users |" for n in numbers) + " stops paying |"]
    lines.append("|---|---:|" + "---:|" * len(numbers) + "---|")
    for method in methods:
        own = [grid[method, n] for n in numbers if (method, n) in grid]
        lengths = [cell.acceptance_length for cell in own if cell.acceptance_length]  # 0: no text ended within the run
        length = f"{sum(lengths) / len(lengths):.2f}" if lengths else "–"
        row = "".join(f" {_table_cell(grid.get((method, n)), gains.get(method, {}).get(n))} |" for n in numbers)
        end = stops_paying(gains[method]) if method in gains else "–"
        lines.append(f"| `{method}` | {length} |{row} {end} |")
    return "\n".join(lines)


def _table_cell(cell: Cell | None, gain: float | None) -> str:
    if cell is None:
        return "–"
    text = f"{cell.tokens_per_s:.0f}" + (f" ({gain:.2f} ×)" if gain else "")
    return text + (f", {cell.num_errors} errors" if cell.num_errors else "")


STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a;"
    "background:#fff}"
    "table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums}th,td{padding:.25rem .7rem;"
    "border-bottom:1px solid #ddd;text-align:right}th:first-child,td:first-child{text-align:left}svg{max-width:100%;"
    "height:auto}.bad{color:#b00020;font-weight:600}"
)
COLUMNS: Sequence[tuple[str, Callable[[Cell], str]]] = (
    ("method", lambda cell: cell.method),
    ("users", lambda cell: str(cell.users)),
    ("tokens/s, all users", lambda cell: f"{cell.tokens_per_s:.1f}"),
    ("acceptance length", lambda cell: f"{cell.acceptance_length:.2f}"),
    ("tokens a chunk", lambda cell: f"{cell.tokens_per_chunk:.2f}"),
    ("first token, ms", lambda cell: _pair(cell.first_token_ms)),
    ("inter-token, ms", lambda cell: _pair(cell.inter_token_ms)),
    ("inter-chunk, ms", lambda cell: _pair(cell.inter_chunk_ms)),
    ("whole text, ms", lambda cell: _pair(cell.e2e_ms)),
    ("streams", lambda cell: str(cell.num_streams)),
    ("errors", lambda cell: str(cell.num_errors)),
)


def _pair(values: tuple[float, float]) -> str:
    return " / ".join(f"{value:.1f}" if value < 100 else f"{value:.0f}" for value in values)


def to_html(cells: Sequence[Cell]) -> str:
    """Return the report: one page without outside resources."""
    gains = speed_ups(cells)
    rows = "".join(
        f"<tr{' class=bad' if cell.num_errors else ''}>"
        + "".join(f"<td>{html.escape(show(cell))}</td>" for _, show in COLUMNS)
        + "</tr>"
        for cell in sorted(cells, key=lambda cell: (cell.users, cell.method != BASE))
    )
    ends = "".join(
        f"<tr><td>{html.escape(method)}</td><td>{stops_paying(by_users)}</td></tr>"
        for method, by_users in gains.items()
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Load</title><style>{STYLE}</style>"
        "<h1>Load: methods × users</h1><p>Times are medians / 95th percentiles over the streams that began in the "
        "window; every text is compared with the first of the same prompt and seed.</p>"
        f"<h2>Where speculation stops paying</h2>{_picture('gain', lambda axes: _draw_gains(axes, gains))}"
        f"<table><tr><th>method</th><th>speed-up over {BASE} falls below 1, in users</th></tr>{ends}</table>"
        f"<h2>Latency against throughput</h2>{_picture('pareto', lambda axes: _draw_latency(axes, cells))}"
        f"<h2>Figures</h2><table><tr>{''.join(f'<th>{name}</th>' for name, _ in COLUMNS)}</tr>{rows}</table></html>\n"
    )


def _picture(salt: str, draw: Callable[[Axes], None]) -> str:
    """Return a drawing as SVG to embed in the page; salt: keeps its ids distinct from those of the others."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 9}):
        figure, out = Figure(figsize=(9, 4), layout="constrained"), io.StringIO()
        axes = figure.subplots()
        draw(axes)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[1]:
            figure.legend(loc="outside right upper", frameon=False)
        figure.savefig(out, format="svg", metadata={"Date": None})
    drawing = out.getvalue()[out.getvalue().index("<svg") :]
    for before in (' id="', "url(#", 'href="#'):
        drawing = drawing.replace(before, f"{before}{salt}-")
    return drawing


def _draw_gains(axes: Axes, gains: Mapping[str, Mapping[int, float]]) -> None:
    for method, by_users in gains.items():
        axes.plot(list(by_users), list(by_users.values()), marker="o", label=method)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("users at once")
    axes.set_ylabel(f"tokens/s ÷ those of {BASE}")


def _draw_latency(axes: Axes, cells: Sequence[Cell]) -> None:
    for method in dict.fromkeys(cell.method for cell in cells):
        own = sorted((cell for cell in cells if cell.method == method), key=lambda cell: cell.users)
        axes.plot([c.tokens_per_s for c in own], [c.inter_token_ms[0] for c in own], marker="o", label=method)
        for cell in own:
            axes.annotate(str(cell.users), (cell.tokens_per_s, cell.inter_token_ms[0]), fontsize=7)
    axes.set_yscale("log")
    axes.set_xlabel("tokens/s of all users (numbers: users)")
    axes.set_ylabel("time per token, ms (median)")
