"""The counts on disk, and the page made from them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from tests.numerics.bench import Cells, Key, merged
from tests.numerics.counts import CLOSE, EXACT, LIMITS, NEAR_TIE, NUM_TOP, Tally, interval
from tests.support.exactness import SAMPLINGS


def rate(count: int, total: int, places: float) -> str:
    """Return a count, and its rate with the interval in percent, as though `places` of the total were counted."""
    low, high = (100 * bound for bound in interval(count * places / total if total else 0, places))
    return f"{count} | {100 * count / total if total else 0:.3g} ({low:.3g} – {high:.3g})"


HEADER = (
    "picks | differ | % of picks (95 %) | at places | near ties | expected % | steps | differ | % of steps (95 %) "
    "| paths differ | Δ log p median | 99.9 % | most |"
)
RULE = "---:|" * 13
NAMES = ("sampling", "dtype", "against", "method", "nodes ≤")


def row(key: tuple[Any, ...], tally: Tally, density: float | None) -> str:
    """Return a line of a table."""
    spread = " | ".join(f"{value:.1e}" for value in (tally.quantile(0.5), tally.quantile(0.999), tally.largest))
    target_tokens = rate(tally.differing, tally.target_tokens, tally.places)
    steps = rate(tally.steps, tally.num_steps, tally.num_steps * tally.places / tally.target_tokens)
    expected = 100 * tally.expected(density)
    return (
        f"| {' | '.join(map(str, key))} | {tally.target_tokens} | {target_tokens} | {tally.distinct} | {tally.near} | {expected:.2g} "
        f"| {tally.num_steps} | {steps} | {tally.paths} | {spread} |"
    )


def table(cells: Mapping[Key, Tally], kept: Sequence[int]) -> str:
    """Return the table by some parts of the key, the sampling first among them."""
    densities = {
        name: tally.close / tally.target_tokens / CLOSE if SAMPLINGS[name].greedy else None
        for (name,), tally in merged(cells, (0,)).items()
    }
    lines = [row(key, tally, densities[key[0]]) for key, tally in merged(cells, kept).items()]
    names = [NAMES[i] for i in kept]
    return "\n".join([f"| {' | '.join(names)} | {HEADER}", f"|{'---|' * len(kept)}{RULE}", *lines])


def margins(cells: Mapping[Key, Tally]) -> str:
    """Return the table of float64's margins at the places where picks differ."""
    shares = (0, 10, 50, 90, 100)
    lines = []
    for key, tally in merged(cells, (0, 1, 2)).items():
        found = list({tuple(place): gap for *place, gap in tally.margins}.values())
        values = [f"{value:.1e}" for value in np.percentile(found, shares)] if found else ["–"] * len(shares)
        below = " | ".join(str(sum(gap < limit for gap in found)) for limit in LIMITS)
        lines.append(f"| {' | '.join(key)} | {len(found)} | {below} | {' | '.join(values)} |")
    limits = " | ".join(f"< {limit:g}" for limit in LIMITS)
    head = f"| sampling | dtype | against | places | {limits} | least | 10 % | median | 90 % | most |"
    return "\n".join([head, "|---|---|---|" + "---:|" * (len(LIMITS) + 6), *lines])


def page(device: str, conditions: Mapping[str, Any], cells: Mapping[Key, Tally]) -> str:
    """Return one device's part of docs/figures/numerics.md."""
    rounded = {key: tally for key, tally in cells.items() if key[1] != EXACT}
    stated = "\n".join(f"- {name}: {value}" for name, value in conditions.items())
    return f"""## {device}

{stated}

### All methods and trees together

{table(cells, (0, 1, 2))}

### By tree size

{table(rounded, (0, 1, 2, 4))}

### Margins of the picks that differ

{margins(cells)}

### By method and tree size

{table(rounded, (0, 1, 2, 3, 4))}
"""


TOP = f"""# float32 and bfloat16 beside float64

Made by `python -m tests.numerics`; [numerics.md](../numerics.md) says what it means. *against* float64: the same step, \
tree and committed text. *against* plain: the same dtype's own one-token passes over the same text, so that the shape \
of the pass alone is left. Picks are those on the path that float64 accepted, each token of a text once per method. \
*expected*, sampled: the probability that the picks differ, from both distributions, over all seeds; greedy: density of \
gaps between the two likeliest at 0 × mean |Δ gap| / 2. Near tie: float64's margin is below {NEAR_TIE:g}. Δ log p: of \
float64's {NUM_TOP} likeliest tokens a row, to 12 % (most: exactly). Intervals are Wilson's, of no difference 0 to 3/n. \
Several methods come by the same place of one text: *at places* counts distinct ones, and intervals count no place \
twice. *made*: trees of the true continuation and random branches.

"""


class Store:
    """The counts of every device on disk, and the page that is made of them."""

    def __init__(self, text: Path) -> None:
        self._text, self._file = text, text.with_suffix(".json")
        self._kept: dict[str, Any] = json.loads(self._file.read_text()) if self._file.exists() else {}

    def put(self, device: str, conditions: Mapping[str, Any], cells: Mapping[Key, Tally]) -> None:
        """Replace a device's counts and write both files."""
        entries = [[*key, asdict(tally)] for key, tally in cells.items()]
        self._kept[device] = {"conditions": dict(conditions), "cells": entries}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"{json.dumps(name)}: {_compact(entry)}" for name, entry in self._kept.items()]
        self._file.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        self.write()

    def write(self) -> None:
        """Write the page from the stored counts."""
        self._text.write_text(TOP + "\n".join(page(name, *self.get(name)) for name in self._kept))

    def get(self, device: str) -> tuple[dict[str, Any], Cells]:
        """Return a device's conditions and counts."""
        entry = self._kept[device]
        return entry["conditions"], {tuple(line[:5]): Tally(**line[5]) for line in entry["cells"]}


def _compact(entry: Mapping[str, Any]) -> str:
    cells = ",\n".join(json.dumps(cell) for cell in entry["cells"])
    return f'{{"conditions": {json.dumps(entry["conditions"])},\n"cells": [\n{cells}]}}'
