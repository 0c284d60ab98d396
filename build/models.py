"""Makes the demo models (tokenizer, target, draft, heads) and publishes each: `python -m build.models`."""

from __future__ import annotations

import argparse
import shutil

import torch

from build.corpus import check_corpus, load_corpus
from build.errors import BuildError, run_command
from build.export import export_model, is_published
from build.heads import cli as heads
from build.heads.settings import KINDS
from build.recipe import RECIPES, Recipe
from build.tokenizer import save_tokenizer, train_tokenizer
from build.train import train_model
from build.workspace import ANY_CORPUS_HELP, Workspace, training_text

ALL_WINDOWS = 10_000


def make_tokenizer(workspace: Workspace, any_corpus: bool) -> None:
    """Train the tokenizer on the training files and save it in every model's folder, unless it exists."""
    if (workspace.models / "target" / "tokenizer.json").exists():
        print("tokenizer: up to date")
        return
    corpus = load_corpus()
    check_corpus(corpus, workspace.recorded_corpus("target"), any_corpus)
    print("tokenizer: about 10 seconds", flush=True)
    tokenizer = train_tokenizer(document.text for document in corpus.train)
    for name in RECIPES:
        save_tokenizer(tokenizer, workspace.models / name)


def make_model(recipe: Recipe, workspace: Workspace, any_corpus: bool) -> None:
    """Train one model, from its checkpoint if there is one, and publish it, unless it is up to date."""
    if is_published(recipe, workspace):
        print(f"{recipe.name}: up to date")
        return
    if not train_model(recipe.name, workspace, any_corpus):
        raise BuildError(f"{recipe.name} was stopped before its end; the same command resumes it")
    export_model(recipe, workspace, training_text(workspace, recipe.name, any_corpus), ALL_WINDOWS)
    print(f"{recipe.name}: wrote models/{recipe.name}")


def make_heads(workspace: Workspace) -> None:
    """Train and publish the target's drafting heads, unless they are up to date."""
    if heads.up_to_date([f"--out={workspace.models}"]):
        print("heads: up to date")
        return
    heads.main([f"--out={workspace.models}"])


def discard(workspace: Workspace) -> None:
    """Delete checkpoints, tokenizer and weights; the recorded corpus stays, for comparison."""
    shutil.rmtree(workspace.scratch, ignore_errors=True)
    for name in (*RECIPES, *KINDS):
        for file in ("config.json", "tokenizer.json"):
            (workspace.models / name / file).unlink(missing_ok=True)


def main() -> None:
    """Run the command; when it is interrupted, the next run continues."""
    parser = argparse.ArgumentParser(prog="python -m build.models", description=__doc__)
    parser.add_argument("--anew", action="store_true", help="discard tokenizer, checkpoints and weights first")
    parser.add_argument("--any-corpus", action="store_true", help=ANY_CORPUS_HELP)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: all)")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    workspace = Workspace()
    if options.anew:
        discard(workspace)
    make_tokenizer(workspace, options.any_corpus)
    for recipe in RECIPES.values():
        make_model(recipe, workspace, options.any_corpus)
    make_heads(workspace)


if __name__ == "__main__":
    run_command(main)
