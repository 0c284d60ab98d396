"""Finishes an engine's folder: engine.json (orchestrator/deployment/engine_manifest.py) and the checkpoint's small files."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

from orchestrator.deployment.engine_manifest import CHECKPOINT, NAME, Manifest


def copy_checkpoint(source: Path, folder: Path) -> None:
    """Put beside an engine what the server reads of its checkpoint: the tokenizer and two small files, no weights."""
    copy_small_files(source, folder / CHECKPOINT)


def copy_small_files(source: Path, folder: Path) -> None:
    """Copy a checkpoint's tokenizer and configurations to a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write engine.json in one piece."""
    partial = folder / f"{NAME}.partial"
    partial.write_text(json.dumps(asdict(manifest), indent=1) + "\n", encoding="utf-8")
    partial.replace(folder / NAME)
