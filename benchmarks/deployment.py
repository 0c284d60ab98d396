"""Runs the deployment of the small models in a dtype, and reads the metrics that its engines report."""

from __future__ import annotations

import contextlib
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from launcher import Server

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "tests/data/serving.toml"
TASKS = ("completion", "edit", "repetitive", "docstring")
#: A late draft costs speed, not text; but a test of speculation needs drafts on a busy machine too.
ENVIRONMENT = {"SERVING_DRAFT_TIMEOUT_MS": "10000"}
#: The engines report twice a second; metrics that have not changed for this long are complete.
SETTLED_S, SETTLE_LIMIT_S = 1.2, 10.0
_SERIES = re.compile(r'^spec_(\w+)\{model="(\w+)"(?:,state="(\w+)")?\} (\S+)$', re.MULTILINE)


@contextlib.contextmanager
def serving(dtype: str, **environ: str) -> Iterator[Server]:
    """Run it in `dtype`; environ: more environment variables."""
    with Server(CONFIG, env=ENVIRONMENT | {"SERVING_DTYPE": dtype} | environ) as server:
        yield server


def engine_metrics(server: Server) -> dict[tuple[str, ...], float]:
    """Return the engines' series: (model, family) or (model, family, state) → value."""
    with urllib.request.urlopen(server.metrics_url, timeout=10) as response:
        text = response.read().decode()
    matches: Iterator[re.Match[str]] = _SERIES.finditer(text)
    return {tuple(key for key in (m[2], m[1], m[3]) if key): float(m[4]) for m in matches}


def settled_metrics(server: Server) -> dict[tuple[str, ...], float]:
    """Return the engines' metrics once unchanged for SETTLED_S, or as they are after SETTLE_LIMIT_S."""
    metrics, since_s = engine_metrics(server), time.monotonic()
    end_s = since_s + SETTLE_LIMIT_S
    while time.monotonic() - since_s < SETTLED_S and time.monotonic() < end_s:
        time.sleep(0.1)
        newest = engine_metrics(server)
        if newest != metrics:
            metrics, since_s = newest, time.monotonic()
    return metrics
