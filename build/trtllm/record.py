"""The small files of an output folder: stages.json (which stages are done), engine.json, the checkpoint's own."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from build.trtllm.commands import Stage
from build.trtllm.plan import Plan
from orchestrator.core.deployment.engine_manifest import NAME, Manifest

STAGES = "stages.json"
#: Files up to this size are hashed by content, larger ones (weights) by name and size: hashing 140 GB takes minutes.
_CONTENT_BYTES = 1 << 20


def stage_hashes(plan: Plan) -> dict[str, str]:
    """Return {stage: SHA-256 of its command, container and inputs}; a change reaches all stages that depend on it."""
    hashes: dict[str, str] = {}
    outputs: dict[str, str] = {}
    for stage in plan.stages:
        inputs = [outputs.get(folder) or folder_hash(Path(folder)) for folder in stage.inputs]
        hashes[stage.name] = _sha256(json.dumps([plan.image, stage.argv, inputs]).encode())
        outputs[stage.output] = hashes[stage.name]
    return hashes


def input_hashes(plan: Plan) -> dict[str, str]:
    """Return {folder: SHA-256} of the folders that the stages read and no stage writes."""
    written = {stage.output for stage in plan.stages}
    return {f: folder_hash(Path(f)) for f in sorted({f for stage in plan.stages for f in stage.inputs} - written)}


def folder_hash(folder: Path) -> str:
    """Hash the files of a checkpoint folder: names, sizes, and the content of small ones."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = {path: path.stat().st_size for path in files}
    rows = [
        (path.relative_to(folder).as_posix(), size, _sha256(path.read_bytes()) if size <= _CONTENT_BYTES else "")
        for path, size in sizes.items()
    ]
    return _sha256(json.dumps(rows).encode())


def read_record(out: Path) -> dict[str, str]:
    """Return {stage: hash} of the stages that are done; a missing or broken record counts as empty."""
    try:
        record = json.loads((out / STAGES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def write_done(out: Path, stage: Stage, stage_hash: str | None) -> None:
    """Note a stage as done, or, with None, as not done."""
    record = {name: value for name, value in read_record(out).items() if name != stage.name}
    if stage_hash:
        record[stage.name] = stage_hash
    _write_json(out / STAGES, record)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write engine.json into an engine's folder."""
    _write_json(folder / NAME, manifest.model_dump())


def copy_small_files(source: Path, folder: Path) -> None:
    """Copy the files of a checkpoint that the server reads, its tokenizer and configurations, to a new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _write_json(file: Path, content: object) -> None:
    """Write a file so that no reader finds it half written."""
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(file)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
