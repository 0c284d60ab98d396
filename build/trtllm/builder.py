"""Runs a plan's stages in order inside the container, resuming where an earlier run ended; it knows no sizes."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from build.trtllm.commands import Stage, is_hub_id
from build.trtllm.engines import Engine
from build.trtllm.plan import Plan
from build.trtllm.record import (
    copy_small_files,
    input_hashes,
    read_record,
    stage_hashes,
    write_done,
    write_manifest,
)
from build.trtllm.render import plan_json
from orchestrator.core.deployment.engine_manifest import CHECKPOINT, Manifest, missing_files
from orchestrator.core.errors import ConfigError, ServingError

#: Seconds between two lines about a running stage, and seconds that an interrupted stage has to end by itself.
BEAT_S = 60.0
GRACE_S = 10.0
_LOG_LINES = 12
_VERSION = "from importlib.metadata import version; print(version('tensorrt_llm'))"


class StageFailed(ServingError):
    """A stage's command failed, or wrote less than it should have."""


def build(plan: Plan, out: Path) -> None:
    """Run the stages that are not done; engine.json is written into each engine's folder.

    Raises ConfigError when a tool is missing or of another version, or when another build runs in `out`; StageFailed
    when a stage fails.
    """
    out.mkdir(parents=True, exist_ok=True)
    with _locked(out):
        hashes = stage_hashes(plan)
        done = read_record(out)
        remaining = [
            stage for stage in plan.stages if done.get(stage.name) != hashes[stage.name] or _missing(stage, plan, out)
        ]
        _check_tools(remaining, plan)
        for number, stage in enumerate(plan.stages, start=1):
            label = f"[{number}/{len(plan.stages)}] {stage.name}"
            if stage in remaining:
                _run_stage(stage, plan, out, label)
                write_done(out, stage, hashes[stage.name])
            else:
                print(f"{label}: done before, skipped", flush=True)
        for engine in plan.engines:
            copy_small_files(_source(engine, out), out / engine.engine_folder / CHECKPOINT)
            write_manifest(out / engine.engine_folder, _manifest(engine, plan))
    print(f"engines ready: {', '.join(str(out / engine.engine_folder) for engine in plan.engines)}", flush=True)


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Lock the output folder for one build; the lock ends with the process."""
    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"another build runs in {out} (flag --out)") from None
        yield


def _check_tools(stages: list[Stage], plan: Plan) -> None:
    """Raise ConfigError for a missing tool, script or package before the first stage, not hours later."""
    if not stages:
        return
    for tool in dict.fromkeys(["python3", *(stage.argv[0] for stage in stages)]):
        if not shutil.which(tool):
            raise ConfigError(f"{tool} is not on PATH: run this in the container {plan.image}")
    for script in (stage.argv[1] for stage in stages):
        if script.endswith(".py") and not Path(script).is_file():
            raise ConfigError(f"{script} does not exist: run this in the container {plan.image}, or set examples_dir")
    calibration = Path(plan.spec.calib_dataset)
    is_calibrated = any("--calib_dataset" in stage.argv for stage in stages)
    if is_calibrated and calibration.is_absolute() and not any(calibration.glob("train*")):
        raise ConfigError(
            f'{calibration} has no train.jsonl of lines {{"text": "…"}} to calibrate with (key calib_dataset)'
        )
    process = subprocess.run(["python3", "-c", _VERSION], capture_output=True, text=True, check=False)
    planned, found = plan.spec.trtllm_version, process.stdout.strip()
    if process.returncode:
        raise ConfigError(f"python3 has no package tensorrt_llm: run this in the container {plan.image}")
    if found != planned:
        raise ConfigError(
            f"TensorRT-LLM here is {found}, the plan is for {planned}: run this in the container {plan.image}, "
            "or plan for the other (key trtllm_version)"
        )


def _run_stage(stage: Stage, plan: Plan, out: Path, label: str) -> None:
    """Run one stage from a clean output folder; its output goes to logs/<stage>.log."""
    log = out / "logs" / f"{stage.name}.log"
    log.parent.mkdir(exist_ok=True)
    write_done(out, stage, None)
    if not stage.name.startswith("fetch-"):  # an interrupted download continues
        shutil.rmtree(out / stage.output, ignore_errors=True)
    (out / stage.output).mkdir(parents=True, exist_ok=True)
    print(f"{label}: started, log {log}", flush=True)
    began = time.monotonic()
    status = _run(stage.argv, out, log, label)
    if status:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:])
        raise StageFailed(f"{stage.name} failed with exit status {status}; the end of {log}:\n{tail}")
    if missing := _missing(stage, plan, out):
        raise StageFailed(f"{stage.name} ended without an error, but {out / stage.output} lacks {', '.join(missing)}")
    _check_rope(stage, plan, out)
    print(f"{label}: done in {time.monotonic() - began:.0f} s", flush=True)


def _check_rope(stage: Stage, plan: Plan, out: Path) -> None:
    """Raise StageFailed when a conversion has lost numbers of the source's rotary positions.

    The converters of Medusa and EAGLE keep only the type (tensorrt_llm/models/medusa/config.py, eagle/config.py), and
    an engine whose positions differ from the model's is wrong without an error. transformers 5 writes the numbers,
    including the base, to rope_parameters, which the converters of these releases do not read.
    """
    engine = next((engine for engine in plan.engines if engine.checkpoint_folder == stage.output), None)
    if engine is None:
        return
    config = json.loads((_source(engine, out) / "config.json").read_text(encoding="utf-8"))
    converted = json.loads((out / stage.output / "config.json").read_text(encoding="utf-8"))
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    wanted = {name: value for name, value in (config.get(key) or {}).items() if isinstance(value, int | float)}
    found = (converted.get("rotary_scaling") or {}) | {"rope_theta": converted.get("rotary_base")}
    if lost := {name: value for name, value in wanted.items() if found.get(name) != value}:
        raise StageFailed(
            f"{stage.name} has lost {key} of {_source(engine, out)}: "
            f"{', '.join(f'{name} {value} became {found.get(name)}' for name, value in lost.items())} "
            f"({out / stage.output}/config.json)"
        )


def _source(engine: Engine, out: Path) -> Path:
    """Return the folder of the checkpoint that an engine is made from."""
    return out / f"sources/{engine.role}" if is_hub_id(engine.source) else Path(engine.source)


def _run(argv: tuple[str, ...], out: Path, log: Path, label: str) -> int:
    """Run a command in `out` and return its exit status; an interrupt ends the command and its children."""
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(argv, cwd=out, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while True:
                try:
                    return process.wait(BEAT_S)
                except subprocess.TimeoutExpired:
                    print(f"{label}: running for {time.monotonic() - began:.0f} s", flush=True)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _missing(stage: Stage, plan: Plan, out: Path) -> list[str]:
    """Return the names of the files that the stage's output lacks."""
    ranks = next((engine.num_ranks for engine in plan.engines if engine.engine_folder == stage.output), 0)
    return missing_files(out / stage.output, ranks)


def _manifest(engine: Engine, plan: Plan) -> Manifest:
    limits = engine.limits
    return Manifest(
        role=engine.role,
        method=plan.spec.method,
        mode=engine.mode,
        gpu=plan.gpu.name,
        trtllm_version=plan.spec.trtllm_version,
        image=plan.image,
        num_ranks=engine.num_ranks,
        max_batch_size=limits.max_batch_size,
        max_input_len=limits.max_input_len,
        max_seq_len=limits.max_seq_len,
        max_draft_len=limits.max_draft_len,
        vocab_size=limits.vocab_size,
        inputs=input_hashes(plan) | {f"stage {name}": value for name, value in stage_hashes(plan).items()},
        plan=json.loads(plan_json(plan)),
    )
