"""The first-run kit from plan to report over the stand-in: its tools on PATH, and the library in a real Triton."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from build.trtllm.check import main
from orchestrator.core.deployment.engine_manifest import read_manifest
from tests.server.conftest import repository
from tests.standin.container_tools import install

pytestmark = [pytest.mark.server, pytest.mark.long, pytest.mark.timeout(900)]


def outcomes_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str, **scripted: str) -> dict[Any, Any]:
    """Run the kit; return its report's outcomes by case and stage. scripted: models over the stand-in."""
    models = repository(tmp_path, "speculative", "speculative_unary", **scripted)
    arguments = ["--out", str(tmp_path / "out"), "--device", "cpu", "--model-repository", str(models), *words]
    status = main([*arguments, "--examples-dir", str(install(tmp_path, monkeypatch))])
    found = json.loads((tmp_path / "out/report.json").read_text())["outcomes"]
    assert status == int(any(each["status"] != "ok" for each in found))
    return {(each["case"], each["stage"]): each for each in found}


def test_kit_runs_dry_and_reports_what_broke(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--cases", "draft_model,lookahead", "--limit-s", "400"]
    arguments += ["--target", str(checkpoints / "target"), "--drafter", str(checkpoints / "draft")]
    found = outcomes_of(tmp_path, monkeypatch, *arguments, target="standin.py", draft="standin.py")
    drafted = [found["draft_model", stage] for stage in ("plan", "build", "torch", "engine", "compare")]
    assert [each["status"] for each in drafted] == ["ok"] * 5, [each["tail"] for each in drafted]
    assert found["draft_model", "engine"]["found"]["total_draft_tokens"] > 0
    assert found["draft_model", "compare"]["found"]["of"] == 3
    assert found["lookahead", "build"]["assumption"] == "flags of a command (build/trtllm/commands.py)"
    assert found["lookahead", "engine"]["status"] == "skipped"
    assert "report.md" in capsys.readouterr().out


def test_kit_trains_a_head_that_has_no_checkpoint_and_carries_it_into_an_engine(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = tmp_path / "corpus.txt"  # six documents, one of them held out
    corpus.write_text("\n".join(f"line {number} of a text without any meaning" for number in range(1200)))
    arguments = ["--cases", "redrafter", "--target", str(checkpoints / "target"), "--limit-s", "400"]
    arguments += ["--heads-tokens", "4096", "--heads-corpus", str(corpus)]
    found = outcomes_of(tmp_path, monkeypatch, *arguments, target="standin.py")
    stages = ["heads", "plan", "build", "torch", "engine", "compare"]
    assert [(stage, each["status"]) for (_, stage), each in found.items()] == [(stage, "ok") for stage in stages], [
        each["tail"] for each in found.values()
    ]
    built = tmp_path / "out/redrafter/build"
    done = list(json.loads((built / "stages.json").read_text()))
    assert done == ["convert-target-base", "convert-target", "build-target"]
    manifest = read_manifest(built / "engines/target")
    assert (manifest.method, manifest.mode, manifest.max_draft_len) == ("redrafter", "explicit_draft_tokens", 25)
    engine = found["redrafter", "engine"]["found"]
    assert engine["num_steps"] < 3 * 48 and engine["total_accepted_draft_tokens"] > 0
    assert found["redrafter", "compare"]["found"]["of"] == 3
