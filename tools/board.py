"""`python -m tools.board`: writes the Grafana board docker/monitoring/grafana/specserve.json from board_panels.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.board_panels import ROWS, Panel

BOARD = Path(__file__).resolve().parent.parent / "docker/monitoring/grafana/specserve.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT = 8, 8


def board() -> dict[str, Any]:
    """Return the board as Grafana imports it."""
    return {
        "uid": "specserve",
        "title": "specserve",
        "tags": ["specserve"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                _source(),
                _variable("instance", "spec_passes_total"),
                _variable("model", "spec_num_requests_running"),
            ]
        },
        "panels": list(_panels()),
    }


def _panels() -> Iterator[dict[str, Any]]:
    number, top = 0, 0
    for title, panels in ROWS:
        number, place = number + 1, {"x": 0, "y": top, "w": 3 * WIDTH, "h": 1}
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        top += 1
        for at, panel in enumerate(panels):
            number += 1
            yield _panel(number, panel, {"x": at % 3 * WIDTH, "y": top + at // 3 * HEIGHT, "w": WIDTH, "h": HEIGHT})
        top += -(-len(panels) // 3) * HEIGHT


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    is_instant = panel.kind != "timeseries"
    custom = {"fillOpacity": 10, "stacking": {"mode": "normal" if panel.stacked else "none"}}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": {} if is_instant else custom},
            "overrides": [],
        },
        "options": {},
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": SOURCE,
                "expr": expression,
                "legendFormat": legend,
                "instant": is_instant,
                "range": not is_instant,
                "format": "table" if panel.kind == "table" else "time_series",
            }
            for at, (legend, expression) in enumerate(panel.queries)
        ],
    }


def _source() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus"}


def _variable(label: str, series: str) -> dict[str, Any]:
    """Return a choice among the values of a label, all of them at first."""
    query = f"label_values({series}, {label})"
    return {
        "name": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": label},
        "definition": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def text() -> str:
    """Return the file's content."""
    return json.dumps(board(), indent=1) + "\n"


if __name__ == "__main__":
    BOARD.parent.mkdir(parents=True, exist_ok=True)
    BOARD.write_text(text(), encoding="utf-8")
    sys.exit(0)
