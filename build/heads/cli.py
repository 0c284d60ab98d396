"""The command `python -m build.heads`: options, and which stage is due."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from build.errors import BuildError
from build.heads.continuations import continuations
from build.heads.publish import check_free, is_published, publish
from build.heads.settings import KINDS, Settings, Sizes, kinds_named
from build.heads.target import FrozenTarget, computing_in, load_target
from build.heads.text import HeadsText, heads_text
from build.heads.train import HeadsRun, begin_run
from build.parallel import Workers, joined_workers, own_device
from build.training import can_compile
from build.workspace import MODELS, Workspace

#: The draft vocabulary of the published EAGLE-3 heads whose targets have 128,256 tokens.
MAX_DRAFT_VOCAB = 32_000
#: Tokens of prompts and the target's continuations; every second step of the plan reads them.
OWN_TOKENS = 400_000
#: Compilation pays off if at least this many steps with short windows remain.
COMPILE_FROM_STEPS = 300
SIZES = {
    "medusa_heads": "Medusa heads, each for one more token",
    "medusa_layers": "residual blocks of a Medusa head",
    "redrafter_layers": "residual blocks of ReDrafter's head",
    "exit_dim": "ReDrafter's width before its LM head; 0: twice the hidden size",
    "draft_vocab": f"EAGLE-3's most frequent tokens; 0: half of the target's, at most {MAX_DRAFT_VOCAB}",
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    found = argparse.ArgumentParser(prog="python -m build.heads", description="Train drafting heads for a model.")
    add = found.add_argument
    add("--target", default=str(MODELS / "target"), help="folder or hub id of a causal language model")
    add("--corpus", default="", help="FILE.txt, FILE.jsonl or a folder (default: the Python standard library)")
    add("--heads", default=",".join(KINDS), help="comma-separated, of %(default)s")
    add("--out", type=Path, default=MODELS, help="published there, a folder per head (default: models)")
    add("--tokens", type=int, default=Settings().plan.tokens, help="budget (default: %(default)s)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda (default: %(default)s)")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of matrix products")
    add("--seed", type=int, default=Settings().seed, help="of parameters and batches")
    add("--threads", type=int, default=0, help="CPU threads (default: all)")
    for name, what in SIZES.items():
        flag = f"--{name.replace('_', '-')}"
        add(flag, type=int, default=getattr(Sizes(), name), help=f"{what} (default: %(default)s)")
    add("--step-tokens", type=int, default=Settings().plan.step_tokens, help="tokens a step (default: %(default)s)")
    add(
        "--own-tokens",
        type=int,
        default=OWN_TOKENS,
        help="of the target's own text to learn from (default: %(default)s)",
    )
    add("--own-hours", type=float, default=0.0, help="limit of time for that text (default: none)")
    add("--hours", type=float, default=0.0, help="shorten the plan to this time by a short burst (default: no limit)")
    add("--ablation", action="store_true", help="also train EAGLE without the sampled token, and compare")
    add("--figures", type=Path, help="folder of the ablation's numbers (default: beside the checkpoint)")
    add("--finish-now", action="store_true", help="begin the last phase at the checkpoint's step")
    add("--publish-only", action="store_true", help="publish the checkpoint as it is, marked as interim")
    add("--dry-run", action="store_true", help="only say what the run would cost")
    return found


def settings_of(options: argparse.Namespace, target: FrozenTarget) -> Settings:
    """Return the settings that the options request; windows do not exceed the target's longest context."""
    vocab_size = len(target.lm_head)
    sizes = Sizes(**{name: getattr(options, name) for name in vars(Sizes())})
    sizes = replace(sizes, draft_vocab=sizes.draft_vocab or min(vocab_size // 2, MAX_DRAFT_VOCAB))
    if min(sizes.medusa_heads, options.tokens, options.step_tokens) < 1 or min(vars(sizes).values()) < 0:
        raise BuildError("token budgets and the number of heads must be positive, other sizes not negative")
    default = Settings()
    max_length = min(getattr(target.config, "max_position_embeddings", 2_048), options.step_tokens)
    plan = replace(
        default.plan,
        tokens=options.tokens,
        step_tokens=options.step_tokens,
        short_length=min(default.plan.short_length, max_length),
        long_length=min(default.plan.long_length, max_length),
    )
    if plan.steps < 1:
        raise BuildError(f"{plan.tokens} tokens are less than a step of {plan.step_tokens} (--tokens, --step-tokens)")
    parts = dict(default.parts) | {"medusa": replace(default.parts["medusa"], depth=sizes.medusa_heads)}
    return replace(
        default,
        kinds=kinds_named(options.heads),
        ablation=options.ablation,
        sizes=sizes,
        plan=plan,
        parts=parts,
        seed=options.seed,
        dtype=options.dtype,
        own_tokens=options.own_tokens,
    )


def main(arguments: list[str] | None = None) -> None:
    """Train, measure and publish; the same command continues an interrupted run."""
    options = parser().parse_args(arguments)
    options.device = own_device(options.device)
    if options.threads:
        torch.set_num_threads(options.threads)
    with joined_workers(options.device) as workers:
        _train_and_publish(options, workers)


def _train_and_publish(options: argparse.Namespace, workers: Workers) -> None:
    scratch = options.out / ".train" / "heads"  # hidden, so that it is not taken for a model
    with workers.first_before_others():
        run, text = _new_run(options, scratch, workers)
    path, limit_s = scratch / "checkpoint.pt", 3600 * options.hours
    if options.publish_only:
        if not path.exists():
            raise BuildError(f"there is no checkpoint {path} to publish; train first")
        run.resume(path)
    else:
        rate = run.measure_rate() if options.dry_run and not path.exists() else run.fit(path, limit_s)
        if options.finish_now:
            run.progress.finish_now()
        if workers.is_first:
            run.announce(dict(run.heads.items()), run.target.device, rate, "; then the heads are measured")
        if options.dry_run:
            return
        if run.progress.plan.long_from - run.progress.step >= COMPILE_FROM_STEPS and can_compile(run.target.device):
            run.compile()
        if not run.train(path, limit_s=limit_s):
            raise BuildError("stopped before its end; the same command resumes it")
    if not workers.is_first:
        return
    run.target.compile(False)
    with computing_in(run.settings.dtype, run.target.device):
        publish(run, text, options.out, scratch, options.figures or scratch)


def up_to_date(arguments: list[str]) -> bool:
    """Return whether the heads that these arguments request are published."""
    options = parser().parse_args(arguments)
    target = load_target(options.target, "cpu", "eagle3" in kinds_named(options.heads))
    return is_published(options.out, settings_of(options, target), target)


def _new_run(options: argparse.Namespace, scratch: Path, workers: Workers) -> tuple[HeadsRun, HeadsText]:
    """Return a run at step 0 and its text."""
    kinds = kinds_named(options.heads)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise BuildError("--device cuda: this torch finds no CUDA device")
    target = load_target(options.target, options.device, "eagle3" in kinds, options.dtype)
    settings = settings_of(options, target)
    check_free(options.out, settings.kinds, target)
    text = heads_text(options.target, options.corpus, Workspace(options.out), scratch)
    own_text = None
    if settings.own_tokens and not options.dry_run:
        own_text = continuations(
            target, text.train, settings.own_tokens, scratch, settings.seed, 3600 * options.own_hours
        )
    return begin_run(settings, target, text.train, text.corpus.sha256, own_text, workers), text
