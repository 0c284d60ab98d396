"""The build of all models survives being killed at any point: it goes on, and ends with the same weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

WEIGHTS = {
    "target": "model.safetensors",
    "draft": "model.safetensors",
    "eagle": "model.safetensors",
    "eagle3": "model.safetensors",
    "medusa": "medusa_lm_head.safetensors",
    "redrafter": "model.safetensors",
}


def build(folder: Path, rename_number: int) -> int:
    """Build everything, each attempt killed at this rename; return the number of attempts."""
    command = [sys.executable, "-m", "tests.support.killed_build", str(folder), str(rename_number)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return int(done.stdout.rsplit("attempts ", 1)[1])


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_build_that_is_killed_again_and_again_ends_with_the_same_weights(tmp_path: Path) -> None:
    assert build(tmp_path / "whole", 0) == 1
    assert build(tmp_path / "killed", 5) > 3
    for name, file in WEIGHTS.items():
        whole, killed = ((tmp_path / run / name / file).read_bytes() for run in ("whole", "killed"))
        assert whole == killed, name
    for name in WEIGHTS:
        provenance = json.loads((tmp_path / "killed" / name / "provenance.json").read_text())
        assert provenance["complete"] and provenance["tokens"] > 0
        assert (tmp_path / "killed" / name / "README.md").stat().st_size > 500
    assert build(tmp_path / "killed", 1) == 1, "everything is up to date"
