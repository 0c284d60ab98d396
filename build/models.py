"""Makes the demo models (tokenizer, target, draft, heads) and publishes each: `python -m build.models`."""

from __future__ import annotations

import argparse
import json
import shutil

from build.corpus import check_corpus, load_corpus
from build.errors import BuildError, run_command
from build.export import export_model, is_published
from build.heads import cli as heads
from build.heads import sharpness
from build.heads.settings import KINDS, PLAN
from build.limits import Limits, add_limits, limits_of
from build.recipe import RECIPES, Recipe
from build.tokenizer import save_tokenizer, train_tokenizer
from build.train import train_model
from build.training import load_checkpoint
from build.workspace import ANY_CORPUS_HELP, Workspace, training_text
from runtime.models.heads.checkpoint.checks import FINGERPRINT, SHARPNESS
from runtime.models.heads.checkpoint.target_tables import fingerprint

ALL_WINDOWS = 10_000
#: ReDrafter's width before its LM head: the target's hidden size, since this LM head is most of a draft's cost here.
EXIT_DIM = 256


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


def make_model(recipe: Recipe, workspace: Workspace, any_corpus: bool, limits: Limits) -> None:
    """Train one model, from its checkpoint if there is one, and publish it, unless it is up to date."""
    if is_published(recipe, workspace):
        print(f"{recipe.name}: up to date")
        return
    if not train_model(recipe.name, workspace, any_corpus, limits=limits):
        raise BuildError(f"{recipe.name} was stopped before its end; the same command resumes it")
    export_model(recipe, workspace, training_text(workspace, recipe.name, any_corpus), ALL_WINDOWS, limits.device)
    print(f"{recipe.name}: wrote models/{recipe.name}")


def make_heads(workspace: Workspace, limits: Limits) -> None:
    """Train and publish the target's drafting heads, unless they are up to date."""
    plan = limits.plan_of(PLAN)
    arguments = [f"--out={workspace.models}", f"--target={workspace.models / 'target'}", f"--device={limits.device}"]
    arguments += [f"--own-tokens={max(min(heads.OWN_TOKENS, plan.tokens // 4), 4 * plan.long_length)}"]
    arguments += [f"--tokens={plan.tokens}", f"--step-tokens={plan.step_tokens}"]
    arguments += [
        f"--hours={limits.seconds_of('heads') / 3600}",
        f"--own-hours={limits.seconds_of('continuations') / 3600}",
    ]
    arguments += [f"--exit-dim={EXIT_DIM}"]
    if heads.up_to_date(arguments):
        print("heads: up to date")
        return
    discard_foreign_heads(workspace)
    heads.main(arguments)


def measure_draft(workspace: Workspace) -> None:
    """Measure how sure the draft model may be of its tokens, unless its config.json already says so."""
    draft = workspace.models / "draft"
    if SHARPNESS not in json.loads((draft / "config.json").read_text()):
        target, kind = workspace.models / "target", sharpness.DRAFT_MODEL
        sharpness.main([str(draft), f"--kind={kind}", f"--target={target}", f"--out={workspace.models}"])


def discard_foreign_heads(workspace: Workspace) -> None:
    """Discard the heads of an earlier target and their checkpoint, so that they are made again."""
    identity = fingerprint(str(workspace.models / "target"))
    for kind in KINDS:
        config = workspace.models / kind / "config.json"
        if config.exists() and json.loads(config.read_text()).get(FINGERPRINT) != identity:
            config.unlink()
    path = workspace.scratch / "heads" / "checkpoint.pt"
    if path.exists() and identity not in load_checkpoint(path)[1].settings_sha256:
        path.unlink()


def discard(workspace: Workspace) -> None:
    """Delete checkpoints, tokenizer and weights; the recorded corpus stays, for comparison."""
    shutil.rmtree(workspace.scratch, ignore_errors=True)
    for name in (*RECIPES, *KINDS):
        for file in ("config.json", "tokenizer.json"):
            (workspace.models / name / file).unlink(missing_ok=True)


def main(arguments: list[str] | None = None, workspace: Workspace | None = None) -> None:
    """Run the command; when it is interrupted or killed, the same command continues."""
    parser = argparse.ArgumentParser(prog="python -m build.models", description=__doc__)
    parser.add_argument("--anew", action="store_true", help="discard tokenizer, checkpoints and weights first")
    parser.add_argument("--any-corpus", action="store_true", help=ANY_CORPUS_HELP)
    add_limits(parser)
    options = parser.parse_args(arguments)
    limits, workspace = limits_of(options), workspace or Workspace()
    if options.anew:
        discard(workspace)
    make_tokenizer(workspace, options.any_corpus)
    for recipe in RECIPES.values():
        make_model(recipe, workspace, options.any_corpus, limits)
    measure_draft(workspace)
    make_heads(workspace, limits)


if __name__ == "__main__":
    run_command(main)
