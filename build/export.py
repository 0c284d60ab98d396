"""Publishes a checkpoint as a Hugging Face folder with provenance and model card: `python -m build.export`."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaForCausalLM

from build.errors import BuildError, run_command
from build.losses import HeldOutLoss, agreement, held_out_loss
from build.model_card import model_card
from build.recipe import Recipe, recipe_named
from build.tokenizer import END_OF_TEXT_ID
from build.training import load_checkpoint
from build.workspace import ANY_CORPUS_HELP, TrainingText, Workspace, load_model, publish_folder, training_text

SHARD_SIZE = "15MB"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
TRAIN_LOSS_WINDOWS = 64
AGREEMENT_WINDOWS = 32


def is_published(recipe: Recipe, workspace: Workspace) -> bool:
    """Return whether the model's folder holds the finished result of exactly this recipe."""
    folder = workspace.models / recipe.name
    if not ((folder / "config.json").exists() and (folder / "provenance.json").exists()):
        return False
    provenance = json.loads((folder / "provenance.json").read_text())
    return bool(
        provenance["complete"]
        and provenance["recipe_sha256"] == recipe.sha256
        and provenance.get("teacher_sha256", "") == teacher_sha256(recipe, workspace)
    )


def teacher_sha256(recipe: Recipe, workspace: Workspace) -> str:
    """Return the SHA-256 of the teacher's provenance.json; "" without a teacher or while there is no such file."""
    if recipe.teacher is None:
        return ""
    file = workspace.models / recipe.teacher / "provenance.json"
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else ""


def export_model(
    recipe: Recipe, workspace: Workspace, text: TrainingText, max_windows: int, device: str = "cpu"
) -> None:
    """Write models/<name> from the checkpoint, all files at once; max_windows: limit on the windows of each loss."""
    path = workspace.checkpoint(recipe.name)
    if not path.exists():
        raise BuildError(f"{recipe.name} has no checkpoint to export; train it first (python -m build.models)")
    state, progress = load_checkpoint(path)
    folder = workspace.scratch / recipe.name / "export"
    shutil.rmtree(folder, ignore_errors=True)
    _write_weights(recipe, state["model"], folder)
    for name in TOKENIZER_FILES:
        shutil.copy(workspace.models / "target" / name, folder / name)
    provenance = {
        "script": f"python -m build.train {recipe.name}",
        "recipe_sha256": recipe.sha256,
        "teacher_sha256": teacher_sha256(recipe, workspace),
        "recipe": asdict(recipe),
        **progress.provenance,
        "corpus": {
            "source": "Python standard library",
            "interpreter": text.corpus.origin,
            **text.corpus.provenance,
        },
        **_measured(recipe, folder, workspace, text, max_windows, device),
    }
    (folder / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")
    (folder / "README.md").write_text(model_card(provenance))
    publish_folder(folder, workspace.models / recipe.name)


def _write_weights(recipe: Recipe, state: dict[str, Any], folder: Path) -> None:
    """Write config.json, generation_config.json and bfloat16 safetensors in shards of less than 15 MiB."""
    model = LlamaForCausalLM(recipe.shape.config())
    model.load_state_dict(state)
    model.generation_config = GenerationConfig(
        bos_token_id=END_OF_TEXT_ID, eos_token_id=END_OF_TEXT_ID, pad_token_id=END_OF_TEXT_ID
    )
    torch.nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors makes its files readable by the owner alone


def _measured(
    recipe: Recipe, folder: Path, workspace: Workspace, text: TrainingText, max_windows: int, device: str
) -> dict[str, Any]:
    """Return losses in nats per token of the published bfloat16 weights, computed in float32."""
    model = load_model(folder, device)
    measured: dict[str, Any] = {
        "train_loss": _rounded(held_out_loss(model, text.train, min(TRAIN_LOSS_WINDOWS, max_windows))),
        "held_out_loss": _rounded(held_out_loss(model, text.held_out, max_windows)),
    }
    if recipe.teacher is not None:
        teacher = load_model(workspace.models / recipe.teacher, device)
        found = asdict(agreement(model, teacher, text.held_out, min(AGREEMENT_WINDOWS, max_windows)))
        measured["agreement"] = {"with": recipe.teacher} | {key: round(value, 4) for key, value in found.items()}
    return measured


def _rounded(loss: HeldOutLoss) -> dict[str, Any]:
    bands = {band: round(value, 4) for band, value in loss.bands.items()}
    return {"mean": round(loss.mean, 4), "bands": bands, "tokens": loss.tokens}


def main() -> None:
    """Run the command; it also publishes an unfinished run, marked as such."""
    parser = argparse.ArgumentParser(prog="python -m build.export", description=__doc__)
    parser.add_argument("model", help="target or draft")
    parser.add_argument("--windows", type=int, default=10_000, help="held-out windows of 2,048 tokens (default: all)")
    parser.add_argument("--any-corpus", action="store_true", help=ANY_CORPUS_HELP)
    options = parser.parse_args()
    recipe, workspace = recipe_named(options.model), Workspace()
    text = training_text(workspace, options.model, options.any_corpus)
    export_model(recipe, workspace, text, options.windows)
    print(f"wrote models/{recipe.name}")


if __name__ == "__main__":
    run_command(main)
