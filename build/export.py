"""Publishes a checkpoint as a Hugging Face folder with provenance and model card; it does not train."""

import argparse
import hashlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaForCausalLM

from build.card import model_card
from build.checkpoint import load_checkpoint, progress_of
from build.corpus import Corpus
from build.errors import BuildError, run_command
from build.losses import HeldOutLoss, agreement, held_out_loss
from build.recipe import Recipe, recipe_named
from build.tokenizer import END_OF_TEXT_ID
from build.workspace import TrainingText, Workspace, training_text

SHARD_SIZE = "15MB"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
TRAIN_LOSS_WINDOWS = 64
AGREEMENT_WINDOWS = 32


def recipe_sha256(recipe: Recipe) -> str:
    """SHA-256 of everything in the recipe, so that a changed recipe is noticed."""
    return hashlib.sha256(json.dumps(asdict(recipe), sort_keys=True).encode()).hexdigest()


def is_published(recipe: Recipe, workspace: Workspace) -> bool:
    """True when the model's folder holds the finished result of exactly this recipe."""
    folder = workspace.models / recipe.name
    if not ((folder / "config.json").exists() and (folder / "provenance.json").exists()):
        return False
    provenance = json.loads((folder / "provenance.json").read_text())
    return bool(provenance["complete"] and provenance["recipe_sha256"] == recipe_sha256(recipe))


def export_model(recipe: Recipe, workspace: Workspace, text: TrainingText, max_windows: int) -> None:
    """Writes models/<name> from the checkpoint: all files in a folder beside it, then one exchange."""
    path = workspace.checkpoint(recipe.name)
    if not path.exists():
        raise BuildError(f"{recipe.name} has no checkpoint to export; train it first (python -m build.models)")
    state = load_checkpoint(path)
    folder = workspace.scratch / recipe.name / "export"
    shutil.rmtree(folder, ignore_errors=True)
    _write_weights(recipe, state, folder)
    for name in TOKENIZER_FILES:
        shutil.copy(workspace.models / "target" / name, folder / name)
    provenance = _provenance(recipe, state, text.corpus) | _losses(recipe, folder, workspace, text, max_windows)
    (folder / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")
    (folder / "README.md").write_text(model_card(provenance))
    exchange(folder, workspace.models / recipe.name)


def main() -> None:
    """Command line: `python -m build.export target|draft`; also publishes an unfinished run, marked as such."""
    parser = argparse.ArgumentParser(prog="python -m build.export", description=__doc__)
    parser.add_argument("model", help="target or draft")
    parser.add_argument("--windows", type=int, default=10_000, help="held-out windows of 2,048 tokens (default: all)")
    parser.add_argument(
        "--any-corpus", action="store_true", help="accept another standard library than the recorded one"
    )
    options = parser.parse_args()
    recipe, workspace = recipe_named(options.model), Workspace()
    text = training_text(workspace, options.model, options.any_corpus)
    export_model(recipe, workspace, text, options.windows)
    print(f"wrote models/{recipe.name}")


def exchange(new: Path, published: Path) -> None:
    """Puts `new` in the place of `published`; a reader finds one of the two at all but one instant."""
    old = new.with_name("replaced")
    shutil.rmtree(old, ignore_errors=True)
    if published.exists():
        published.rename(old)
    new.rename(published)
    shutil.rmtree(old, ignore_errors=True)


def _write_weights(recipe: Recipe, state: dict[str, Any], folder: Path) -> None:
    """config.json, generation_config.json and bfloat16 safetensors in shards of less than 15 MiB."""
    model = LlamaForCausalLM(recipe.shape.config())
    model.load_state_dict(state["model"])
    model.generation_config = GenerationConfig(
        bos_token_id=END_OF_TEXT_ID, eos_token_id=END_OF_TEXT_ID, pad_token_id=END_OF_TEXT_ID
    )
    torch.nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors creates its files for the owner alone


def _provenance(recipe: Recipe, state: dict[str, Any], corpus: Corpus) -> dict[str, Any]:
    """How the weights came to be: enough to train them again."""
    progress = progress_of(state)
    return {
        "script": f"python -m build.train {recipe.name}",
        "complete": progress.step >= progress.plan.steps,
        "recipe_sha256": recipe_sha256(recipe),
        "recipe": asdict(recipe),
        "plan_followed": asdict(progress.plan),
        "corpus": {
            "source": "Python standard library",
            "sha256": corpus.sha256,
            "interpreter": corpus.interpreter,
            "train_files": len(corpus.train),
            "held_out_files": len(corpus.held_out),
        },
        "torch": torch.__version__,
        "tokens": progress.step * progress.plan.step_tokens,
        "wall_minutes": round(progress.wall_s / 60, 1),
    }


def _losses(recipe: Recipe, folder: Path, workspace: Workspace, text: TrainingText, max_windows: int) -> dict[str, Any]:
    """Losses in nats per token of the published bfloat16 weights, computed in float32."""
    model = _load(folder)
    losses: dict[str, Any] = {
        "train_loss": _rounded(held_out_loss(model, text.train, min(TRAIN_LOSS_WINDOWS, max_windows))),
        "held_out_loss": _rounded(held_out_loss(model, text.held_out, max_windows)),
    }
    if recipe.teacher is not None:
        teacher = _load(workspace.models / recipe.teacher)
        agreed = agreement(model, teacher, text.held_out, min(AGREEMENT_WINDOWS, max_windows))
        losses["agreement"] = {"with": recipe.teacher} | {key: round(value, 4) for key, value in asdict(agreed).items()}
    return losses


def _load(folder: Path) -> LlamaForCausalLM:
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def _rounded(loss: HeldOutLoss) -> dict[str, Any]:
    """The loss to four decimals, so that the file reads well."""
    bands = {band: round(value, 4) for band, value in loss.bands.items()}
    return {"mean": round(loss.mean, 4), "bands": bands, "tokens": loss.tokens}


if __name__ == "__main__":
    run_command(main)
