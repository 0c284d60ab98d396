"""The series that the dashboard, the alert rules and the manifests read, by their names in Prometheus expressions."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "docker/monitoring"
BOARD = MONITORING / "grafana/specserve.json"
_NAME = re.compile(r"\bspec_\w*[a-z0-9]\b")
_EXPRESSION = re.compile(r"^\s*expr: (?:\||>-?)?(.*(?:\n {10}.*)*)", re.MULTILINE)


def names_in(text: str) -> set[str]:
    """Return the names of our series in a text."""
    return set(_NAME.findall(text))


def board_expressions() -> list[str]:
    """Return the expressions of the board's panels and variables, with Grafana's variables filled in."""
    board = json.loads(BOARD.read_text(encoding="utf-8"))
    found = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    return [re.sub(r"\$(instance|model)\b", ".*", text).replace("$__rate_interval", "1m") for text in found]


def variable_queries() -> list[str]:
    """Return the queries of the board's variables."""
    board = json.loads(BOARD.read_text(encoding="utf-8"))
    return [entry["definition"] for entry in board["templating"]["list"] if "definition" in entry]


def alert_expressions() -> list[str]:
    """Return the expressions of the recording and alert rules."""
    return _EXPRESSION.findall((MONITORING / "alerts.yml").read_text(encoding="utf-8"))


def manifest_names() -> set[str]:
    """Return the names of our series in the Kubernetes manifests, as the autoscaler reads them."""
    files = [path for path in (ROOT / "docker").rglob("*.y*ml") if MONITORING not in path.parents]
    return set().union(*(names_in(path.read_text(encoding="utf-8")) for path in files))


def read_names() -> set[str]:
    """Return the names of all series that any of them reads."""
    return names_in("\n".join([*board_expressions(), *variable_queries(), *alert_expressions()])) | manifest_names()
