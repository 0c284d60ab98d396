"""`python -m tests.exact` (make exact): all settings over 40 prompts × 128 tokens, in float64 and then in float32.

Answers are stored per setting under .exact/, so that an interrupted run continues where it stopped; a change of the
weights, the prompts or the code starts again. The table is docs/figures/exact.md; a run over some settings replaces
only their rows.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import hashlib
import json
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from auditor.settings import SETTINGS
from benchmarks.deployment import CONFIG, ROOT, serving
from benchmarks.traffic import Prompt, mixed_prompts
from launcher import Server
from orchestrator.core.deployment.config import CHECKPOINTS, ServingConfig, load_config
from tests.support.client_pool import Answer
from tests.support.exactness import NEAR_TIE, SAMPLINGS
from tests.support.suite import ALONE, AT_ONCE, Row, Suite, Unit

STORE = ROOT / ".exact"
TABLE = ROOT / "docs" / "figures" / "exact.md"
BASE = "none"


class Store:
    """Answers on disk, by unit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, unit: Unit) -> list[Answer] | None:
        """Return a unit's answers, or None if it has not been run."""
        file = self._file(unit)
        return [Answer(**entry) for entry in json.loads(file.read_text())] if file.exists() else None

    def put(self, unit: Unit, answers: Sequence[Answer]) -> None:
        """Store a unit's answers."""
        part = self._file(unit).with_suffix(".part")
        part.write_text(json.dumps([dataclasses.asdict(answer) for answer in answers]))
        part.rename(self._file(unit))

    def _file(self, unit: Unit) -> Path:
        names = "+".join(dict.fromkeys(case.setting for case in unit.cases))
        slug = f"{unit.sampling}-{unit.name}".replace(", ", "-").replace(" ", "_")
        return self.folder / f"{slug}-{zlib.crc32(names.encode()):08x}.json"


def fingerprint(config: ServingConfig, prompts: Sequence[Prompt], num_tokens: int) -> str:
    """Return a name for the weights, the prompts and the code together."""
    models = [folder for key in CHECKPOINTS if (folder := getattr(config, key))]
    files = [path for name in ("orchestrator", "runtime") for path in (ROOT / name).rglob("*.py")]
    files += [path for folder in models for path in Path(folder).glob("*.safetensors")]
    digest = hashlib.sha256(f"{prompts} {num_tokens}".encode())
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def answers_of(suite: Suite, store: Store, dtype: str, log: Callable[[str], None]) -> list[list[Answer]]:
    """Return the answers of all units; run those that the store does not have."""
    with contextlib.ExitStack() as stack:
        server: Server | None = None
        for number, unit in enumerate(suite.units, start=1):
            if store.get(unit) is not None:
                continue
            server = server or stack.enter_context(serving(dtype))
            began_s = time.monotonic()
            store.put(unit, suite.run(unit, server.grpc_url))
            took_s = time.monotonic() - began_s
            log(f"{dtype} {number}/{len(suite.units)}: {unit.sampling}, {unit.name}: {took_s:.0f} s")
    return [store.get(unit) or [] for unit in suite.units]


HEADER = (
    "| dtype | sampling | setting | mode | requests | tokens | tokens per step | drafts accepted | requests per pass "
    "| differences | near ties | made |\n|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|---|"
)


class Table:
    """The rows of all runs so far; a new row replaces the old one of the same name, and settings that are gone go."""

    def __init__(self, file: Path) -> None:
        self._file = file
        rows: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}
        self._rows = {name: row for name, row in rows.items() if row["cells"][2] in SETTINGS}

    def add(self, row: Row, made: str) -> None:
        """Add a row; made: the date, and a fingerprint of weights, prompts and code."""
        found = [f"{row.dtype}: {difference}" for difference in row.differences]
        self._rows[f"{row.dtype}, {row.name}"] = {"cells": row.cells(), "made": made, "found": found}

    def write(self, text: Path) -> None:
        """Write the rows as JSON and as a page, ordered by dtype, sampling, mode and setting."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(self._rows, indent=1) + "\n")
        text.write_text(page(sorted(self._rows.values(), key=_place)))


def _place(row: dict[str, Any]) -> tuple[int, ...]:
    dtype, sampling, setting, mode = row["cells"][:4]
    orders = (["float64", "float32"], list(SAMPLINGS), [ALONE, AT_ONCE], list(SETTINGS))
    return tuple(order.index(value) for order, value in zip(orders, (dtype, sampling, mode, setting), strict=True))


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return docs/figures/exact.md."""
    lines = [f"| {' | '.join([*row['cells'], row['made']])} |" for row in rows]
    found = [f"- {difference}" for row in rows for difference in row["found"]]
    rule = SAMPLINGS["sampled"]
    return f"""# Exactness: the same text, whatever the method

Made by `make exact` over held-out prompts of `tests/data/prompts`, the tasks by turns, over gRPC on the real server. \
The last column says when, and names weights, prompts and code by a fingerprint.

*greedy* is temperature 0, compared with `transformers` `generate` on the same weights in the same dtype. *sampled* is \
temperature {rule.temperature:.3g}, top-p {rule.top_p:.3g}, one seed a prompt: `none` alone is compared with the stock \
model's log p plus the keyed noise, everything else with `none` alone. *alone* starts from a cold cache; \
*{AT_ONCE}* mixes the settings of its run and shares KV blocks. A near tie is a difference whose two tokens are less \
than {NEAR_TIE:g} apart when recomputed in float64; *differences* counts the others. The settings are those of \
`auditor/settings.py`.

{HEADER}
{chr(10).join(lines)}

{"No difference and no near tie." if not found else chr(10).join(found)}
"""


def log(text: str) -> None:
    """Print a line of progress."""
    print(text, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything; return 1 if a text differs beyond a near tie, or at all in float64."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtypes", nargs="+", default=["float64", "float32"])
    parser.add_argument("--samplings", nargs="+", default=list(SAMPLINGS), choices=SAMPLINGS)
    parser.add_argument(
        "--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS, help="the first must be `none`"
    )
    parser.add_argument("--table", type=Path, default=TABLE, help="its rows are kept beside it as JSON")
    options = parser.parse_args(arguments)
    if options.settings[0] != BASE:
        parser.error(f"--settings must begin with {BASE!r}: the others are compared with it")
    config, prompts = load_config(CONFIG), mixed_prompts(options.prompts)
    print_name = fingerprint(config, prompts, options.tokens)
    table, faults = Table(options.table.with_suffix(".json")), 0
    for dtype in options.dtypes:
        turns = [[name] for name in options.settings]
        suite = Suite(config, prompts, options.tokens, dtype, options.samplings, turns)
        rows = suite.judge(answers_of(suite, Store(STORE / print_name / dtype), dtype, log))
        for row in rows:
            table.add(row, f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d} {print_name}")
        faults += sum(len(row.faults) for row in rows)
        table.write(options.table)
    log(options.table.read_text())
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
