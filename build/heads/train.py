"""Trains all heads in one run that reads each batch's target states once; it does not know export."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from build.checkpoint import Progress, load_checkpoint, progress_of, save_checkpoint
from build.data import Tokens, batch
from build.errors import BuildError
from build.heads.make import make_heads
from build.heads.objectives import draw, loss_of
from build.heads.settings import ABLATED, KINDS, Settings
from build.heads.target import FrozenTarget, computing_in
from build.recipe import Plan

#: Options that say a plan's numbers; the others are defaults.
PLAN_OPTIONS = {"tokens": "--tokens", "step_tokens": "--step-tokens"}
DEFAULTS = "build/heads/settings.py"


@dataclass
class Run:
    """Heads in training with all that their next step needs. compiled: `loss_of`, as long as windows stay short."""

    settings: Settings
    target: FrozenTarget
    heads: nn.ModuleDict
    optimizer: torch.optim.Optimizer
    progress: Progress
    stream: Tokens
    compiled: Callable[..., Tensor] | None = None


def begin_run(settings: Settings, target: FrozenTarget, stream: Tokens, corpus_sha256: str) -> Run:
    """A run at step 0 with seeded parameters."""
    heads = make_heads(target, settings, stream)
    progress = Progress(settings.plan, corpus_sha256, settings_sha256=f"{settings.sha256} {target.identity}")
    run = Run(settings, target, heads, _optimizer(heads, settings), progress, stream)
    target.fit_scale(present_windows(run))
    return run


def resume_run(run: Run, path: Path) -> None:
    """Brings `run` to the state of the checkpoint at `path`; its next step equals that of the saved run."""
    state = load_checkpoint(path)
    progress = progress_of(state)
    if (progress.corpus_sha256, progress.settings_sha256) != (run.progress.corpus_sha256, run.progress.settings_sha256):
        raise BuildError(f"{path} is of another corpus, target or settings; delete it to start anew")
    _check_plan(progress.plan, run.progress.plan, path)
    run.heads.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    run.progress = progress


def _check_plan(followed: Plan, asked: Plan, path: Path) -> None:
    """Refuse another plan than the checkpoint's but for its cut: every rate so far was a share of that plan's end."""
    for key, had in asdict(replace(followed, cut_step=asked.cut_step)).items():
        if had != (wanted := getattr(asked, key)):
            raise BuildError(
                f"{path} follows a plan of {key} {had}, asked for are {wanted} ({PLAN_OPTIONS.get(key, DEFAULTS)}); "
                f"ask for {had} to go on, or delete it to start anew"
            )


def save_run(run: Run, path: Path) -> None:
    """Writes all that `resume_run` needs."""
    save_checkpoint(path, run.heads, run.optimizer, run.progress)


def train_step(run: Run) -> dict[str, float]:
    """One optimizer step of every head on the batch of the run's present step; returns their losses."""
    share = run.progress.plan.rate(run.progress.step)
    for group in run.optimizer.param_groups:
        group["lr"] = share * run.settings.part(group["head"]).peak_rate
    losses = backward(run, present_windows(run))
    for head in run.heads.values():
        nn.utils.clip_grad_norm_(head.parameters(), run.settings.max_grad_norm)
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.progress.step += 1
    kept = run.progress.losses
    run.progress.losses = {name: kept.get(name, loss) * 0.95 + 0.05 * loss for name, loss in losses.items()}
    return losses


def backward(run: Run, windows: Tensor) -> dict[str, float]:
    """windows: (B, n + 1). Adds each head's gradients, one graph at a time; returns the losses by name."""
    losses = {}
    if run.compiled and windows.shape[1] - 1 != run.progress.plan.short_length:
        run.compiled = None  # compiling anew for the few long windows would take longer than it saves
        run.target.compile(False)
    with computing_in(run.settings.dtype, run.target.device):
        read = run.target.read(windows.to(run.target.device))
        for name, head in run.heads.items():
            drawn = draw(name, read, run.settings, _generator(run, name))
            loss = (run.compiled or loss_of)(name, head, read, run.settings, drawn)
            loss.backward()
            losses[name] = loss.detach()
    return {name: float(loss) for name, loss in losses.items()}


def present_windows(run: Run) -> Tensor:
    """The batch (B, n + 1) of the present step: a function of the step alone."""
    plan, step = run.progress.plan, run.progress.step
    phase = plan.phase(step)
    return batch(run.stream, run.settings.seed, step - phase.first, plan.step_tokens // phase.length, phase.length)


def compile_run(run: Run) -> None:
    """Fuses the many small operations of a step; measured: 1.3 s instead of 2.1 s, for minutes of work at first."""
    run.target.compile()
    run.compiled = torch.compile(loss_of, dynamic=False)


def step_seconds(run: Run) -> float:
    """How long a step of the run takes here: its gradients computed once to warm up and once to measure."""
    windows = present_windows(run)
    backward(run, windows)
    begin_s = time.perf_counter()
    backward(run, windows)
    run.optimizer.zero_grad()
    return time.perf_counter() - begin_s


def _generator(run: Run, name: str) -> torch.Generator:
    """What is random in a head's loss at the present step: the same in a resumed run, and whatever else is trained."""
    number = (*KINDS, ABLATED).index(name)
    seed = (run.settings.seed * 1_000_003 + run.progress.step) * 64 + number
    return torch.Generator().manual_seed(seed % (1 << 63))


def _optimizer(heads: nn.ModuleDict, settings: Settings) -> torch.optim.Optimizer:
    """AdamW with groups of each head's own; gains and biases are not decayed."""
    groups: list[dict[str, Any]] = []
    for name, head in heads.items():
        matrices = [parameter for parameter in head.parameters() if parameter.dim() >= 2]
        vectors = [parameter for parameter in head.parameters() if parameter.dim() < 2]
        groups.append({"params": matrices, "weight_decay": settings.weight_decay, "head": name})
        groups.append({"params": vectors, "weight_decay": 0.0, "head": name})
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)
