"""`python -m tests.invariance` (make audit-full): one text per seed, whatever the method, its settings and the other requests.

24 prompts × 128 tokens in float64, at temperature 0 once and at 0.7, 1.0 and 1.5 with two seeds each: every method, its
settings in turn over the prompts, alone and 8 at once, against `none` alone; and `none` alone against transformers.
Answers are stored per unit under .exact/, so that an interrupted run continues where it stopped.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from auditor.settings import SETTINGS
from benchmarks.deployment import CONFIG, ROOT
from benchmarks.traffic import mixed_prompts
from orchestrator.core.deployment.config import load_config
from tests.exact import BASE, STORE, Store, answers_of, fingerprint, log
from tests.support.exactness import TEMPERATURES
from tests.support.suite import ALONE, AT_ONCE, Row, Suite, by_method

PAGE = ROOT / "docs" / "figures" / "invariance.md"
GREEDY = "greedy"
DTYPE = "float64"
#: Method → its settings, which the prompts use in turn.
METHODS = {SETTINGS[turn[0]][0]: turn for turn in by_method()}


def entry(row: Row, made: str) -> dict[str, Any]:
    """Return a row for the JSON file."""
    method, parameters = SETTINGS[row.setting]
    return {
        "sampling": row.sampling, "method": method, "setting": row.setting, "parameters": parameters, "mode": row.mode,
        "requests": len(row.answers), "tokens": sum(len(answer.ids) for _, answer in row.answers),
        "accepted": sum(answer.num_accepted for _, answer in row.answers),
        "differences": [str(difference) for difference in row.differences], "made": made,
    }  # fmt: skip


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return docs/figures/invariance.md: differences / tokens, by method and temperature."""
    samplings, methods = _in_order(rows, "sampling"), _in_order(rows, "method")
    lines = [f"| method | mode | {' | '.join(samplings)} |", f"|---|---|{'---:|' * len(samplings)}"]
    for method in methods:
        for mode in (ALONE, AT_ONCE):
            cells = [_cell(rows, sampling, method, mode) for sampling in samplings]
            lines.append(f"| {method} | {mode} | {' | '.join(cells)} |")
    found = [f"- {difference}" for row in rows for difference in row["differences"]]
    tokens, requests = (sum(row[name] for row in rows) for name in ("tokens", "requests"))
    return f"""# One text per seed, whatever the method

Made by `make audit-full` on the real server in float64: {requests:,} requests, {tokens:,} tokens, \
**{len(found)} differences**. Every cell: differences / tokens. Each prompt goes through every method, whose settings \
(`auditor/settings.py`) take turns. *{ALONE}*: one request at a time, each method with a cache of its own; \
*{AT_ONCE}*: the methods of one run mixed. Everything is compared with `none` alone, and that with transformers: its \
`generate` at temperature 0, above it the stock model's log p plus the keyed noise. The columns are temperatures \
and seeds; a dash was not run.

{chr(10).join(lines)}

Made: {", ".join(_in_order(rows, "made"))} (day, and weights, prompts and code by a fingerprint).

{"No difference." if not found else chr(10).join(found)}
"""


def _in_order(rows: Iterable[dict[str, Any]], name: str) -> list[str]:
    return list(dict.fromkeys(row[name] for row in rows))


def _cell(rows: Sequence[dict[str, Any]], sampling: str, method: str, mode: str) -> str:
    wanted = [row for row in rows if (row["sampling"], row["method"], row["mode"]) == (sampling, method, mode)]
    if not wanted:
        return "–"
    return f"{sum(len(row['differences']) for row in wanted)} / {sum(row['tokens'] for row in wanted):,}"


def merged(file: Path, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the stored rows with the new ones in place of the old, ordered by sampling and setting."""
    before = json.loads(file.read_text()) if file.exists() else []
    keyed = {(row["sampling"], row["setting"], row["mode"]): row for row in [*before, *rows]}
    order = [GREEDY, *TEMPERATURES]
    return sorted(keyed.values(), key=lambda row: (order.index(row["sampling"]), list(SETTINGS).index(row["setting"])))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything; return 1 if a text differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, help="besides `none`")
    parser.add_argument("--samplings", nargs="+", default=[GREEDY, *TEMPERATURES], choices=[GREEDY, *TEMPERATURES])
    parser.add_argument("--page", type=Path, default=PAGE, help="its rows are kept beside it as JSON")
    options = parser.parse_args(arguments)
    config, prompts = load_config(CONFIG), mixed_prompts(options.prompts)
    name = fingerprint(config, prompts, options.tokens)
    turns = [turn for method, turn in METHODS.items() if method == BASE or method in options.methods]
    suite = Suite(config, prompts, options.tokens, DTYPE, options.samplings, turns)
    rows = suite.judge(answers_of(suite, Store(STORE / name / DTYPE), DTYPE, log))
    made = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d} {name}"
    kept = merged(options.page.with_suffix(".json"), [entry(row, made) for row in rows])
    options.page.with_suffix(".json").write_text(json.dumps(kept, indent=1) + "\n")
    options.page.write_text(page(kept))
    log(options.page.read_text())
    return int(any(row.differences for row in rows))


if __name__ == "__main__":
    sys.exit(main())
