"""The check of a GPU: a part that fails or hangs is a line of the report, and the others still run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu_check


def test_parts_end_alone_and_the_report_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "PARTS", dict.fromkeys(("imports", "rows"), gpu_check.imports))
    monkeypatch.setitem(gpu_check.LIMITS_S, "rows", 0)
    assert gpu_check.main(["--device", "cpu", "--out", str(tmp_path)]) == 1
    sound, late = json.loads((tmp_path / "report.json").read_text())
    assert sound["status"] == "ok" and set(gpu_check.PACKAGES) <= set(sound["found"])
    assert late["status"] == "over 0 s"
    page = (tmp_path / "report.md").read_text()
    assert "| imports | ok |" in page and "| rows | over 0 s |" in page


def test_all_parts_fit_into_ten_minutes() -> None:
    assert sum(gpu_check.LIMITS_S.values()) <= 600 and gpu_check.LIMITS_S.keys() == gpu_check.PARTS.keys()
