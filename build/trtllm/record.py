"""stages.json: which stages of an output folder are done, by hashes of their commands and inputs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from build.trtllm.commands import Stage
from build.trtllm.plan import Plan

NAME = "stages.json"
#: Files up to this size count by content, larger ones (weights) by name and size: hashing 140 GB takes minutes.
_CONTENT_BYTES = 1 << 20


def stage_hashes(plan: Plan) -> dict[str, str]:
    """Return {stage: SHA-256 of its command, container and inputs}; a change reaches all later stages."""
    hashes: dict[str, str] = {}
    outputs: dict[str, str] = {}
    for stage in plan.stages:
        inputs = [outputs.get(folder) or folder_hash(Path(folder)) for folder in stage.inputs]
        hashes[stage.name] = _sha256(json.dumps([plan.image, stage.argv, inputs]).encode())
        outputs[stage.output] = hashes[stage.name]
    return hashes


def input_hashes(plan: Plan) -> dict[str, str]:
    """Return {folder: SHA-256} of the given folders that the stages read, not of what a stage fetches or makes."""
    made = {stage.output for stage in plan.stages}
    given = {folder for stage in plan.stages for folder in stage.inputs} - made
    return {folder: folder_hash(Path(folder)) for folder in sorted(given)}


def folder_hash(folder: Path) -> str:
    """Hash the files of a checkpoint folder: names, sizes, and the content of small ones."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    rows = [(path.relative_to(folder).as_posix(), path.stat().st_size, _content(path)) for path in files]
    return _sha256(json.dumps(rows).encode())


def read_record(out: Path) -> dict[str, str]:
    """Return {stage: hash} of what is done; a missing or broken record means nothing is."""
    try:
        record = json.loads((out / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def write_done(out: Path, stage: Stage, stage_hash: str | None) -> None:
    """Note a stage as done, or, with None, as not done."""
    record = {name: value for name, value in read_record(out).items() if name != stage.name}
    if stage_hash:
        record[stage.name] = stage_hash
    partial = out / f"{NAME}.partial"
    partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    partial.replace(out / NAME)


def _content(path: Path) -> str:
    return _sha256(path.read_bytes()) if path.stat().st_size <= _CONTENT_BYTES else ""


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
