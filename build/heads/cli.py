"""Command line: `python -m build.heads`; it only reads options and says which stage is due."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from build.errors import BuildError
from build.heads.publish import check_free, is_published, publish
from build.heads.settings import KINDS, Settings, Sizes, kinds_named
from build.heads.target import FrozenTarget, computing_in, load_target
from build.heads.text import HeadsText, heads_text
from build.heads.train import Run, begin_run, compile_run, resume_run, save_run, step_seconds, train_step
from build.loop import can_compile, cut, run_steps
from build.workspace import MODELS, Workspace

#: The published EAGLE-3 heads have this draft vocabulary, of targets with 128,256 tokens.
MAX_DRAFT_VOCAB = 32_000
COMPILE_FROM_STEPS = 300
SIZES = {
    "medusa_heads": "Medusa heads, each a place farther",
    "medusa_layers": "residual blocks of a Medusa head",
    "redrafter_layers": "residual blocks of ReDrafter's head",
    "exit_dim": "ReDrafter's width before its LM head; 0: twice the hidden size",
    "draft_vocab": f"EAGLE-3's most frequent tokens; 0: half of the target's, at most {MAX_DRAFT_VOCAB}",
}


def parser() -> argparse.ArgumentParser:
    """The options, with what they are when left out."""
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
        add(
            f"--{name.replace('_', '-')}",
            type=int,
            default=getattr(Sizes(), name),
            help=f"{what} (default: %(default)s)",
        )
    add("--step-tokens", type=int, default=Settings().plan.step_tokens, help="tokens a step (default: %(default)s)")
    add("--ablation", action="store_true", help="also train EAGLE without the sampled token, and compare")
    add("--figures", type=Path, help="folder of the ablation's numbers (default: beside the checkpoint)")
    add("--finish-now", action="store_true", help="begin the last phase at the checkpoint's step")
    add("--publish-only", action="store_true", help="publish the checkpoint as it is, marked as interim")
    add("--dry-run", action="store_true", help="only say what the run would cost")
    return found


def settings_of(options: argparse.Namespace, context: int, vocab_size: int) -> Settings:
    """What the options ask for; context: the target's longest, which windows do not exceed."""
    sizes = Sizes(**{name: getattr(options, name) for name in vars(Sizes())})
    sizes = replace(sizes, draft_vocab=sizes.draft_vocab or min(vocab_size // 2, MAX_DRAFT_VOCAB))
    if min(sizes.medusa_heads, options.tokens, options.step_tokens) < 1 or min(vars(sizes).values()) < 0:
        raise BuildError("token budgets and the number of heads must be positive, other sizes not negative")
    default = Settings()
    plan = replace(
        default.plan,
        tokens=options.tokens,
        step_tokens=options.step_tokens,
        short_length=min(default.plan.short_length, context, options.step_tokens),
        long_length=min(default.plan.long_length, context, options.step_tokens),
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
    )


def main(arguments: list[str] | None = None) -> None:
    """Train, measure, publish; interrupted, the same command goes on where it was."""
    options = parser().parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    run, text = prepared(options)
    path = checkpoint_of(options)
    if path.exists():
        resume_run(run, path)
    elif options.publish_only:
        raise BuildError(f"there is no checkpoint {path} to publish; train first")
    if options.publish_only:
        published(run, text, options)
        return
    if options.finish_now:
        cut(run.progress)
    announce(run)
    if options.dry_run:
        return
    if compiling_pays(run):
        compile_run(run)
    if not run_steps(run.progress, lambda: train_step(run), lambda: save_run(run, path)):
        raise BuildError("stopped before its end; the same command resumes it")
    published(run, text, options)


def up_to_date(arguments: list[str]) -> bool:
    """True when what these arguments ask for is published."""
    options = parser().parse_args(arguments)
    target = load_target(options.target, "cpu", "eagle3" in kinds_named(options.heads))
    return is_published(options.out, settings_of(options, _context(target), len(target.lm_head)), target)


def prepared(options: argparse.Namespace) -> tuple[Run, HeadsText]:
    """A run at step 0 and its text."""
    kinds = kinds_named(options.heads)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise BuildError("--device cuda: this torch finds no CUDA device")
    target = load_target(options.target, options.device, "eagle3" in kinds, options.dtype)
    settings = settings_of(options, _context(target), len(target.lm_head))
    check_free(options.out, settings.kinds, target)
    text = heads_text(options.target, options.corpus, Workspace(), scratch_of(options.out))
    return begin_run(settings, target, text.train, text.corpus.sha256), text


def compiling_pays(run: Run) -> bool:
    """True when many short windows are left, and there is a compiler for them."""
    plan, step = run.progress.plan, run.progress.step
    return plan.long_from - step >= COMPILE_FROM_STEPS and can_compile(run.target.device)


def published(run: Run, text: HeadsText, options: argparse.Namespace) -> None:
    """Measures and publishes what was trained, in the arithmetic of training."""
    scratch = scratch_of(options.out)
    run.target.compile(False)
    with computing_in(run.settings.dtype, run.target.device):
        publish(run, text, options.out, scratch, options.figures or scratch)


def announce(run: Run) -> None:
    """Says what the run will cost before it costs anything."""
    plan, step = run.progress.plan, run.progress.step
    minutes = (plan.steps - step) * step_seconds(run) / 60
    sizes = ", ".join(f"{name} {_millions(head):.2f} M" for name, head in run.heads.items())
    tokens = (plan.steps - step) * plan.step_tokens
    print(
        f"{sizes} parameters; {tokens / 1e6:.2f} M tokens from step {step}: about {minutes:.0f} minutes "
        f"on {run.target.device.type} by a trial step",
        flush=True,
    )


def scratch_of(out: Path) -> Path:
    """Folder of checkpoints and token streams; hidden, so that it is not taken for a model."""
    return out / ".train" / "heads"


def checkpoint_of(options: argparse.Namespace) -> Path:
    """The one checkpoint of the runs that publish to the same folder."""
    return scratch_of(options.out) / "checkpoint.pt"


def _context(target: FrozenTarget) -> int:
    return int(getattr(target.config, "max_position_embeddings", 2_048))


def _millions(head: torch.nn.Module) -> float:
    return sum(parameter.numel() for parameter in head.parameters()) / 1e6
