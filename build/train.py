"""Trains the demo target or draft by its recipe, resumably: `python -m build.train target|draft`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from build.data import Tokens
from build.errors import BuildError, run_command
from build.export import teacher_sha256
from build.limits import NO_LIMITS, Limits, add_limits, limits_of
from build.losses import Loss, distillation_loss, held_out_loss, text_loss
from build.recipe import Recipe, recipe_named
from build.training import Progress, Run, adamw, can_compile
from build.workspace import ANY_CORPUS_HELP, Workspace, load_model, training_text

QUICK_HELD_OUT_WINDOWS = 8


@dataclass
class ModelRun(Run[LlamaForCausalLM]):
    """The training run of a whole model. loss: of windows (B, n + 1), in nats per token."""

    loss: Loss

    def backward(self, windows: Tensor) -> dict[str, float]:
        """Add the gradients of a batch of windows, (B, n + 1) int64, and return the loss."""
        with torch.autocast(self.model.device.type, torch.bfloat16):
            loss = self.loss(windows.to(self.model.device))
        loss.backward()
        return {"loss": float(loss.detach())}


def muon_and_adamw(model: LlamaForCausalLM, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices, and AdamW for the embeddings and the gains.

    The updates of Muon are scaled to those of AdamW (Liu et al. 2025, arXiv 2502.16982, section 2.2), so that one
    learning rate serves both. Measured on the demo target: the loss of AdamW after 220 steps is reached after 160.
    """
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.dim() == 2]
    others = [model.model.embed_tokens.weight, *(gain for gain in model.parameters() if gain.dim() == 1)]
    muon = torch.optim.Muon(matrices, lr=0.0, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
    return [muon, adamw({"others": others}, weight_decay)]


def begin_run(
    recipe: Recipe,
    stream: Tokens,
    corpus_sha256: str,
    teacher: LlamaForCausalLM | None,
    device: str,
    teacher_sha256: str = "",
) -> ModelRun:
    """Return a run at step 0 with seeded parameters. stream: (n,), the training text."""
    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM(recipe.shape.config())
    torch.nn.Module.to(model, device).train()
    return ModelRun(
        model,
        muon_and_adamw(model, recipe.weight_decay),
        Progress(recipe.plan, corpus_sha256, settings_sha256=f"{recipe.sha256} {teacher_sha256}"),
        stream,
        recipe.seed,
        recipe.max_grad_norm,
        text_loss(model) if teacher is None else distillation_loss(model, teacher, recipe.teacher_weight),
    )


def train_model(
    name: str, workspace: Workspace, any_corpus: bool, finish_now: bool = False, limits: Limits = NO_LIMITS
) -> bool:
    """Train the model `name`, from its checkpoint if there is one; return whether its plan is complete."""
    recipe = recipe_named(name)
    recipe = replace(recipe, plan=limits.plan_of(recipe.plan))
    device = limits.device
    text = training_text(workspace, name, any_corpus)
    teacher, teacher_sha = _load_teacher(recipe, workspace, device), teacher_sha256(recipe, workspace)
    run = begin_run(recipe, text.train, text.corpus.sha256, teacher, device, teacher_sha)
    path = workspace.checkpoint(name)
    rate = run.fit(path, limits.seconds_of(name))
    if finish_now:
        run.progress.finish_now()
    run.announce({name: run.model}, run.model.device, rate)
    if can_compile(run.model.device):
        # Fuses the loss's many small operations; measured here: 1.3 times the tokens per second, for a minute's work.
        run.loss = torch.compile(run.loss, dynamic=False)
    return run.train(path, lambda: _log_held_out_loss(run, text.held_out), limits.seconds_of(name))


def _load_teacher(recipe: Recipe, workspace: Workspace, device: str) -> LlamaForCausalLM | None:
    """Load the model whose distribution is distilled; return None if the recipe gives it no weight."""
    if recipe.teacher is None or recipe.teacher_weight == 0:
        return None
    folder = workspace.models / recipe.teacher
    if not (folder / "config.json").exists():
        raise BuildError(f"{recipe.name} is distilled from models/{recipe.teacher}, which is missing; train it first")
    return load_model(folder, device).requires_grad_(False)


def _log_held_out_loss(run: ModelRun, held_out: Tokens) -> None:
    loss = held_out_loss(run.model, held_out, QUICK_HELD_OUT_WINDOWS)
    bands = " ".join(f"{band}: {value:.3f}" for band, value in loss.bands.items())
    print(f"checkpoint at step {run.progress.step}, held-out loss {loss.mean:.3f} ({bands})", flush=True)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m build.train", description=__doc__)
    parser.add_argument("model", help="target or draft")
    parser.add_argument("--finish-now", action="store_true", help="begin the last phase at the checkpoint's step")
    parser.add_argument("--any-corpus", action="store_true", help=ANY_CORPUS_HELP)
    add_limits(parser)
    options = parser.parse_args()
    train_model(options.model, Workspace(), options.any_corpus, options.finish_now, limits_of(options))


if __name__ == "__main__":
    run_command(main)
