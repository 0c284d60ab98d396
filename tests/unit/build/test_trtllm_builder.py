"""The builder of TensorRT-LLM engines with stand-ins on PATH: no engine is built here."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from build.trtllm.__main__ import main
from build.trtllm.builder import StageFailed, build
from build.trtllm.plan import make_plan
from build.trtllm.record import folder_hash
from build.trtllm.render import plan_json
from build.trtllm.spec import EngineSpec, load_spec
from orchestrator.core.deployment.engine_manifest import check_engine, read_manifest
from tests.unit.build.test_trtllm_plan import CHECKPOINTS, DATA, DRAFT, LLAMA_8B
from tests.unit.build.test_trtllm_rules import refusal

ROOT = Path(__file__).resolve().parents[3]
# Stand-ins for the container's tools: they note the call, and leave files of the right names.
PYTHON = r"""#!/bin/sh
case "$1" in -c) echo "${STANDIN_VERSION-1.2.1}"; exit ${STANDIN_NO_PACKAGE-0};; esac
echo "convert $*" >> "$STANDIN_CALLS"
echo "stand-in for $1"
while [ $# -gt 0 ]; do [ "$1" = --output_dir ] && out="$2"; shift; done
mkdir -p "$out"
[ -n "$STANDIN_SILENT" ] || echo "${STANDIN_CONFIG-{\}}" > "$out/config.json"
"""
BUILD = """#!/bin/sh
echo "build $*" >> "$STANDIN_CALLS"
while [ $# -gt 0 ]; do
  [ "$1" = --output_dir ] && out="$2"
  [ "$1" = --workers ] && ranks="$2"
  shift
done
mkdir -p "$out"
echo '{"version": "1.2.1"}' > "$out/config.json"
case "$out" in *"$STANDIN_BREAKS") echo "out of memory, says the stand-in"; exit 9;; esac
[ -n "$STANDIN_SLEEPS" ] && sleep 60
while [ "$ranks" -gt 0 ]; do ranks=$((ranks - 1)); echo x > "$out/rank$ranks.engine"; done
"""


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Put the stand-ins on PATH; return the folder of examples."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("python3", PYTHON), ("trtllm-build", BUILD)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    for script in ("models/core/llama/convert_checkpoint.py", "quantization/quantize.py"):
        (tmp_path / "examples" / script).parent.mkdir(parents=True)
        (tmp_path / "examples" / script).touch()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("STANDIN_CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("STANDIN_BREAKS", "nothing")
    return tmp_path / "examples"


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def plan_with(tools, values=DRAFT, **more):
    return make_plan(EngineSpec(**{**values, "examples_dir": str(tools), **more}))


def calls(tools):
    file = tools.parent / "calls"
    found = [line.split()[0] for line in file.read_text().splitlines()] if file.exists() else []
    file.unlink(missing_ok=True)
    return found


ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}


OF_TRANSFORMERS_5 = {"rope_parameters": {**ROPE, "rope_theta": 500000.0}}


@pytest.mark.parametrize(
    ("source", "converted", "lost"),
    [
        ({"rope_scaling": ROPE}, {"rotary_scaling": ROPE}, ""),
        ({"rope_scaling": None}, {}, ""),
        ({"rope_scaling": ROPE}, {"rotary_scaling": {"type": "llama3"}}, "factor 8.0 became None, low_freq_factor 1.0"),
        ({"rope_scaling": ROPE}, {"rotary_scaling": {**ROPE, "factor": 1.0}}, "factor 8.0 became 1.0"),
        ({"rope_scaling": ROPE}, {"rotary_scaling": None}, "factor 8.0 became None"),
        (OF_TRANSFORMERS_5, {"rotary_scaling": ROPE, "rotary_base": 500000.0}, ""),
        (OF_TRANSFORMERS_5, {"rotary_scaling": ROPE, "rotary_base": 10000.0}, "rope_theta 500000.0 became 10000.0"),
        (OF_TRANSFORMERS_5, {"rotary_base": 10000.0}, "factor 8.0 became None"),
    ],
)
def test_conversion_that_loses_rope_scaling_is_refused(tools, out, tmp_path, monkeypatch, source, converted, lost):
    config = json.loads((CHECKPOINTS / "llama-3.1-8b/config.json").read_text()) | source
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    monkeypatch.setenv("STANDIN_CONFIG", json.dumps(converted))
    plan = plan_with(tools, {**LLAMA_8B, "target": str(tmp_path / "model")})
    if not lost:
        build(plan, out)
    else:
        with pytest.raises(StageFailed, match=f"convert-target has lost {next(iter(source))} .*: {lost}"):
            build(plan, out)
        assert calls(tools) == ["convert"]  # nothing was built from it


def test_build_runs_every_stage_in_order_and_writes_the_manifests(tools, out, capsys):
    plan = plan_with(tools, num_gpus=2)
    build(plan, out)
    assert calls(tools) == ["convert", "build", "convert", "build"]
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()[::2]] == [
        "[1/4] convert-target",
        "[2/4] build-target",
        "[3/4] convert-draft",
        "[4/4] build-draft",
        "engines ready",
    ]
    target = check_engine(out / "engines/target", version="1.2.1", draft=out / "engines/draft")
    assert (target.num_ranks, target.max_draft_len, target.vocab_size, target.mode) == (
        (2, 5, 128256, "draft_tokens_external")
    )
    assert target.plan == json.loads(plan_json(plan))
    assert target.inputs[DRAFT["target"]] == folder_hash(CHECKPOINTS / "llama-3.1-8b")
    kept = out / "engines/target/checkpoint/config.json"
    assert kept.read_text() == (CHECKPOINTS / "llama-3.1-8b/config.json").read_text()
    assert "stand-in for" in (out / "logs/convert-target.log").read_text()


def test_build_again_skips_what_is_done(tools, out, capsys):
    build(plan_with(tools), out)
    calls(tools)
    build(plan_with(tools), out)
    assert calls(tools) == []
    assert capsys.readouterr().out.count("done before, skipped") == 4


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"max_batch_size": 9}, ["build", "build"]),
        ({"draft_len": 6}, ["build"]),
        ({"quantisation": "fp8", "drafter_quantisation": "none"}, ["convert", "build"]),
        ({"kv_fraction": 0.5}, []),
    ],
)
def test_build_after_a_change_runs_what_it_reaches(tools, out, change, expected):
    build(plan_with(tools), out)
    calls(tools)
    build(plan_with(tools, **change), out)
    assert calls(tools) == expected
    assert (
        read_manifest(out / "engines/target").plan["spec"] | change
        == read_manifest(out / "engines/target").plan["spec"]
    )


def test_build_after_a_change_of_the_checkpoint_runs_what_it_reaches(tools, out, tmp_path):
    copy = tmp_path / "checkpoint"
    copy.mkdir()
    (copy / "config.json").write_bytes((CHECKPOINTS / "llama-3.1-8b/config.json").read_bytes())
    plan = plan_with(tools, {**DRAFT, "target": str(copy)})
    build(plan, out)
    calls(tools)
    (copy / "model.safetensors").write_bytes(b"w")
    build(plan, out)
    assert calls(tools) == ["convert", "build"]


def test_build_goes_on_with_the_stage_that_failed(tools, out, monkeypatch):
    monkeypatch.setenv("STANDIN_BREAKS", "engines/target")
    with pytest.raises(
        StageFailed, match=r"build-target failed with exit status 9(.|\n)*out of memory, says"
    ) as caught:
        build(plan_with(tools), out)
    assert str(out / "logs/build-target.log") in str(caught.value)
    assert calls(tools) == ["convert", "build"]
    assert not (out / "engines/target/engine.json").exists()
    monkeypatch.setenv("STANDIN_BREAKS", "nothing")
    build(plan_with(tools), out)
    assert calls(tools) == ["build", "convert", "build"]


def test_build_repeats_a_stage_that_another_plan_began(tools, out, monkeypatch):
    plan = plan_with(tools, LLAMA_8B)
    build(plan, out)
    monkeypatch.setenv("STANDIN_BREAKS", "engines/target")
    with pytest.raises(StageFailed):
        build(plan_with(tools, LLAMA_8B, max_batch_size=9), out)
    calls(tools)
    monkeypatch.setenv("STANDIN_BREAKS", "nothing")
    (out / "engines/target/rank0.engine").touch()  # all its files are there, half written
    build(plan, out)
    assert calls(tools) == ["build"]


def test_build_clears_what_an_earlier_plan_left(tools, out):
    build(plan_with(tools, LLAMA_8B, num_gpus=2), out)
    assert (out / "engines/target/rank1.engine").exists()
    build(plan_with(tools, LLAMA_8B), out)
    assert not (out / "engines/target/rank1.engine").exists()


def test_build_repeats_a_stage_whose_output_is_gone(tools, out):
    build(plan_with(tools, LLAMA_8B), out)
    calls(tools)
    (out / "engines/target/rank0.engine").unlink()
    build(plan_with(tools, LLAMA_8B), out)
    assert calls(tools) == ["build"]


def test_stage_that_leaves_nothing_has_failed(tools, out, monkeypatch):
    monkeypatch.setenv("STANDIN_SILENT", "1")
    with pytest.raises(StageFailed, match=r"convert-target ended without an error, but .* lacks config.json"):
        build(plan_with(tools, LLAMA_8B), out)


def test_missing_tool_names_the_container_before_anything_runs(tools, out):
    (tools.parent / "bin/trtllm-build").unlink()
    words = refusal(build, plan_with(tools), out)
    image = "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"
    assert words == f"trtllm-build is not on PATH: run this in the container {image}"
    assert calls(tools) == []


def test_missing_calibration_text_is_told_before_anything_runs(tools, out, tmp_path):
    plan = plan_with(tools, LLAMA_8B, quantisation="fp8", calib_dataset=str(tmp_path / "calibration"))
    assert refusal(build, plan, out) == (
        f'{tmp_path}/calibration has no train.jsonl of lines {{"text": "…"}} to calibrate with (key calib_dataset)'
    )
    assert calls(tools) == []


def test_missing_script_package_and_other_version_are_told_apart(tools, out, monkeypatch):
    plan = plan_with(tools)
    script = tools / "models/core/llama/convert_checkpoint.py"
    script.unlink()
    assert refusal(build, plan, out).startswith(f"{script} does not exist: run this in the container ")
    script.touch()
    monkeypatch.setenv("STANDIN_VERSION", "1.0.0")
    assert refusal(build, plan, out).startswith("TensorRT-LLM here is 1.0.0, the plan is for 1.2.1: run this in ")
    monkeypatch.setenv("STANDIN_NO_PACKAGE", "1")
    assert refusal(build, plan, out).startswith("python3 has no package tensorrt_llm: run this in the container ")
    assert calls(tools) == []


def command(tools, out, *more):
    spec = str(DATA / "specs" / "lookahead-rtx-4090.toml")
    return ["build", spec, "--examples-dir", str(tools), "--out", str(out), *more]


def test_dry_run_prints_the_commands_and_touches_nothing(tools, out, capsys):
    assert main(command(tools, out, "--dry-run")) == 0
    shown = capsys.readouterr().out
    assert shown.count("\n# ") == 2 and "trtllm-build \\\n    --checkpoint_dir checkpoints/target" in shown
    assert not out.exists() and calls(tools) == []
    subprocess.run(["sh", "-eu", "-c", shown], check=True)  # as it stands
    assert calls(tools) == ["convert", "build"]


def test_command_ends_with_the_status_of_its_case(tools, out, monkeypatch, capsys):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert main(command(tools, out)) == 0
    monkeypatch.setenv("STANDIN_BREAKS", "engines/target")
    assert main(command(tools, out, "--max-batch-size", "2")) == 1
    assert main(command(tools, out, "--gpu", "none")) == 2
    (out / "file").touch()
    assert main(command(tools, out / "file")) == 2
    err = capsys.readouterr().err
    assert err.count("trtllm: ") == 3 and err.endswith(f"trtllm: {out}/file: File exists\n")


def test_interrupted_build_ends_its_children_and_goes_on_later(tools, out):
    environ = {**os.environ, "STANDIN_SLEEPS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "build.trtllm", *command(tools, out)], cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)  # fmt: skip
    log = out / "logs/build-target.log"
    until = time.monotonic() + 15
    while not log.exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert "another build runs in" in refusal(build, plan_with(tools, LLAMA_8B), out)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert b"interrupted; the same command continues" in process.communicate(timeout=15)[1]
    assert process.returncode == 130 and time.monotonic() - began < 5
    calls(tools)
    build(make_plan(load_spec(DATA / "specs" / "lookahead-rtx-4090.toml", {"examples_dir": str(tools)})), out)
    assert calls(tools) == ["build"]
