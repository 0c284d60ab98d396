"""`python -m tests.exact` (make exact): all settings over 40 prompts × 128 tokens, in float64 and then in float32.

Answers are kept per setting under .exact/, so that a run that was broken off goes on where it stopped; a change
of the weights, the prompts or the code starts afresh. The table goes to docs/figures/exact.md.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import hashlib
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import transformers

from launcher import Server
from orchestrator.config import ServingConfig, load_config
from tests.support.exactness import NEAR_TIE, SAMPLINGS
from tests.support.suite import AT_ONCE, Row, Suite, Unit
from tests.support.traffic import Answer, Prompt, mixed_prompts

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "serving.toml"
STORE = ROOT / ".exact"
TABLE = ROOT / "docs" / "figures" / "exact.md"
# A late draft costs speed, not text; but a test of speculation wants to see it happen on a busy machine too.
ENVIRONMENT = {"SERVING_DRAFT_TIMEOUT_MS": "10000"}


@contextlib.contextmanager
def serving(dtype: str) -> Iterator[Server]:
    """Run the shipped deployment in `dtype`."""
    with Server(CONFIG, env=ENVIRONMENT | {"SERVING_DTYPE": dtype}) as server:
        yield server


class Store:
    """Answers on disk, by unit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, unit: Unit) -> list[Answer] | None:
        """Return a unit's answers, or None when it has not been run."""
        file = self._file(unit)
        return [Answer(**entry) for entry in json.loads(file.read_text())] if file.exists() else None

    def put(self, unit: Unit, answers: Sequence[Answer]) -> None:
        """Keep a unit's answers."""
        part = self._file(unit).with_suffix(".part")
        part.write_text(json.dumps([dataclasses.asdict(answer) for answer in answers]))
        part.rename(self._file(unit))

    def _file(self, unit: Unit) -> Path:
        return self.folder / f"{unit.sampling}-{unit.name.replace(', ', '-').replace(' ', '_')}.json"


def fingerprint(config: ServingConfig, prompts: Sequence[Prompt], num_tokens: int) -> str:
    """Return a name for the weights, the prompts and the code together."""
    files = [path for name in ("orchestrator", "runtime") for path in (ROOT / name).rglob("*.py")]
    files += [path for folder in (config.target, config.draft) for path in Path(folder).glob("*.safetensors")]
    digest = hashlib.sha256(f"{prompts} {num_tokens}".encode())
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def answers_of(suite: Suite, store: Store, dtype: str, say: Callable[[str], None]) -> list[list[Answer]]:
    """Return the answers of all units, from the store where it has them."""
    with contextlib.ExitStack() as stack:
        server: Server | None = None
        for number, unit in enumerate(suite.units, start=1):
            if store.get(unit) is not None:
                continue
            server = server or stack.enter_context(serving(dtype))
            began_s = time.monotonic()
            store.put(unit, suite.run(unit, server.grpc_url))
            took_s = time.monotonic() - began_s
            say(f"{dtype} {number}/{len(suite.units)}: {unit.sampling}, {unit.name}: {took_s:.0f} s")
    return [store.get(unit) or [] for unit in suite.units]


HEADER = (
    "| dtype | sampling | setting | mode | requests | tokens | tokens per step | drafts accepted | requests per pass "
    "| differences | near ties |\n|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|"
)


def table(rows: Sequence[Row], config: ServingConfig, num_tokens: int, print_name: str) -> str:
    """Return docs/figures/exact.md."""
    lines = [f"| {' | '.join(row.cells())} |" for row in rows]
    found = [f"- {row.dtype}: {difference}" for row in rows for difference in row.differences]
    rule = SAMPLINGS["sampled"]
    return f"""# Exactness: the same text, whatever the method

Made by `make exact` on {datetime.datetime.now(datetime.UTC):%Y-%m-%d} ({platform.machine()}, \
torch {torch.__version__}, transformers {transformers.__version__}; \
target `{Path(config.target).name}`, draft `{Path(config.draft).name}`; \
fingerprint of weights, prompts and code {print_name}). Held-out prompts of `tests/data/prompts`, the tasks by turns, \
at most {num_tokens} tokens each, over gRPC on the real server.

*greedy* is temperature 0, compared with `transformers` `generate` on the same weights in the same dtype. *sampled* is \
temperature {rule.temperature:.3g}, top-p {rule.top_p:.3g}, one seed a prompt: `none` alone is compared with the stock \
model's log p plus the keyed noise, everything else with `none` alone. *alone* starts from a cold cache; \
*{AT_ONCE}* mixes all methods and shares KV blocks. A near tie is a difference whose two tokens are less than \
{NEAR_TIE:g} apart when recomputed in float64; *differences* are those that are none.

{HEADER}
{chr(10).join(lines)}

{"No difference and no near tie." if not found else chr(10).join(found)}
"""


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything; return 1 when a text differs beyond a near tie, or at all in float64."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtypes", default="float64,float32")
    parser.add_argument("--samplings", default=",".join(SAMPLINGS), help="to share the work between two machines")
    parser.add_argument("--table", type=Path, default=TABLE)
    options = parser.parse_args(arguments)
    config, prompts = load_config(CONFIG), mixed_prompts(options.prompts)
    print_name = fingerprint(config, prompts, options.tokens)
    rows: list[Row] = []
    for dtype in options.dtypes.split(","):
        suite = Suite(config, prompts, options.tokens, dtype, options.samplings.split(","))
        answers = answers_of(suite, Store(STORE / print_name / dtype), dtype, say)
        rows += suite.judge(answers)
    options.table.parent.mkdir(parents=True, exist_ok=True)
    options.table.write_text(table(rows, config, options.tokens, print_name))
    say(options.table.read_text())
    return int(any(row.faults for row in rows))


if __name__ == "__main__":
    sys.exit(main())
