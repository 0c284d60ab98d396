"""The first-run kit: its cases, its report, its limits, and the assumption that it names; no engine is run here."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from build.heads.cli import parser as heads_parser
from build.trtllm import check as kit
from build.trtllm import check_stages
from build.trtllm.check import CASES, LIMITS_S, check, main, parser, stages_of
from build.trtllm.check_assumptions import assumption_of
from build.trtllm.check_stages import STAGES, _common, run_stage
from build.trtllm.modes import MODES
from tests.unit.build.test_trtllm_plan import LLAMA_8B, REDRAFTER


def test_dry_run_tells_cases_stages_and_limits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", "--cases", "none,medusa,redrafter"]) == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("none: TinyLlama/") and "build ≤ 3600 s" in first
    assert " + FasterDecoding/" in second and "heads" not in second
    assert third.startswith("redrafter: TinyLlama/") and ": heads ≤ 7200 s, plan ≤ 120 s" in third
    assert main(["--dry-run", "--cases", "redrafter,lookahead", "--drafter", "/mine"]) == 0
    trained, without = capsys.readouterr().out.splitlines()
    assert " + /mine: plan" in trained and "/mine" not in without
    assert CASES.keys() <= MODES.keys() and LIMITS_S.keys() == STAGES.keys()


def test_unknown_case_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", "--cases", "magic"]) == 2
    assert "unknown case 'magic' (allowed: none, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stage", "log", "assumption"),
    [
        ("build", "convert_checkpoint.py: error: unrecognized arguments: --model_dir", "flags of a command"),
        ("engine", "Assertion failed: EagleConfig is set, but DecodingMode is not set", "the decoding mode beside"),
        ("engine", "KV cache block reuse must be enabled for speculative decoding target model", "block reuse"),
        ("engine", "EAGLE-1 requires Eagle-tree depth being equal", "shape of trees"),
        ("engine", "TypeError: __init__(): incompatible function arguments", "argument names of the bindings"),
        ("compare", "compare: the text differs from the torch engine's: 'a'", "greedy text is the target's"),
        ("engine", "CUDA out of memory", "the memory arithmetic of the plan"),
        ("torch", "CUDA out of memory", "the torch engine runs the checkpoint in float32"),
        ("engine", "nothing known", "the engine loads and answers through the executor"),
    ],
)
def test_what_fails_names_the_assumption_that_broke(stage: str, log: str, assumption: str) -> None:
    assert assumption_of(stage, log).startswith(assumption)


def test_common_start_is_a_share_of_the_longer_text() -> None:
    assert _common("abcd", "abcd") == 1.0 == _common("", "")
    assert _common("abcd", "abxd") == 0.5 and _common("ab", "abcd") == 0.5


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Stages that do what the name of their case says, in the place of the real ones."""
    program = tmp_path / "stage.py"
    program.write_text(
        "import json, sys, time\n"
        "from pathlib import Path\n"
        "stage, job = sys.argv[sys.argv.index('--stage') + 1], json.loads(sys.argv[sys.argv.index('--job') + 1])\n"
        "if stage == 'engine' and job['case'] == 'lookahead':\n"
        "    print('DecodingMode is not set'); sys.exit(1)\n"
        "if stage == 'build' and job['case'] == 'medusa':\n"
        "    print('hanging', flush=True); time.sleep(600)\n"
        "Path(job['folder'], stage + '.json').write_text(json.dumps({'tokens_per_s': 7.5}))\n"
    )
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {program} "$@"\n')
    interpreter.chmod(0o755)
    monkeypatch.setattr(kit.sys, "executable", str(interpreter))
    return tmp_path


def test_failed_or_hanging_stage_ends_its_case_alone_and_the_report_says_why(scripted: Path) -> None:
    options = parser().parse_args(["--out", str(scripted / "out"), "--limit-s", "20"])
    monkey: dict[str, Any] = {name: CASES[name] for name in ("lookahead", "none")}
    outcomes = {(o.case, o.stage): o for o in check(monkey, scripted / "out", options)}
    stages = stages_of("none", "")
    assert [outcomes["lookahead", stage].status for stage in stages] == ["ok", "ok", "ok", "failed", "skipped"]
    assert [outcomes["none", stage].status for stage in stages] == ["ok"] * len(stages)
    assert "the decoding mode beside its configuration" in outcomes["lookahead", "engine"].assumption
    report = (scripted / "out/report.md").read_text()
    assert "| lookahead | engine | failed |" in report and "tokens_per_s 7.5" in report
    assert len(json.loads((scripted / "out/report.json").read_text())["outcomes"]) == 2 * len(stages)


def test_stage_beyond_its_limit_is_ended(scripted: Path) -> None:
    options = parser().parse_args(["--out", str(scripted / "out"), "--limit-s", "3"])
    outcomes = check({"medusa": CASES["medusa"]}, scripted / "out", options)
    assert [outcome.status for outcome in outcomes] == ["ok", "timed out", "skipped", "skipped", "skipped"]
    assert "hanging" in outcomes[1].tail and outcomes[1].seconds < 60


def test_plan_stage_plans_the_smallest_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = {"case": "lookahead", "target": LLAMA_8B["target"], "drafter": "", "gpu": "h100", "folder": str(tmp_path)}
    job |= {"device": "cuda", "repository": "", "examples": "/app/examples"}
    assert main(["--stage", "plan", "--job", json.dumps(job)]) == 0
    assert capsys.readouterr().out.startswith("lookahead on 1 GPU h100") and (tmp_path / "plan.json").is_file()
    assert main(["--stage", "plan", "--job", json.dumps(job | {"gpu": "h1000"})]) == 1
    assert "unknown gpu 'h1000'" in capsys.readouterr().err


def test_heads_without_a_checkpoint_are_trained_and_planned_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command is one that build.heads takes; what it publishes is here a checkpoint of known sizes."""

    def trained(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        options = heads_parser().parse_args(command[3:])
        assert (options.heads, options.target, options.tokens, options.own_tokens) == ("redrafter", target, 4096, 0)
        assert options.corpus == "chats.jsonl"
        shutil.copytree(REDRAFTER["drafter"], options.out / "redrafter")
        return subprocess.CompletedProcess(command, 0)

    target = str(REDRAFTER["target"])
    job = {"case": "redrafter", "target": target, "drafter": "", "gpu": "h100", "folder": str(tmp_path)}
    job |= {"device": "cuda", "repository": "", "examples": "/app/examples", "heads_tokens": "4096"}
    job |= {"heads_corpus": "chats.jsonl"}
    assert run_stage("plan", job) == 1
    assert "method 'redrafter' needs the heads' checkpoint" in capsys.readouterr().err
    monkeypatch.setattr(check_stages.subprocess, "run", trained)
    assert run_stage("heads", job) == 0 and run_stage("plan", job) == 0
    assert f"--drafter_model_dir {tmp_path}/heads/redrafter" in capsys.readouterr().out
    monkeypatch.setattr(check_stages.subprocess, "run", lambda command, check: subprocess.CompletedProcess(command, 3))
    assert run_stage("heads", job) == 1
    assert "build.heads ended with exit status 3" in capsys.readouterr().err
