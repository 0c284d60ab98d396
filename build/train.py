"""Trains one model by its recipe, resumably; it does not know export or model cards."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from build.checkpoint import Progress, load_checkpoint, progress_of, save_checkpoint
from build.data import Tokens, batch
from build.errors import BuildError, run_command
from build.loop import can_compile, cut, run_steps
from build.losses import Loss, distillation_loss, held_out_loss, text_loss
from build.recipe import Recipe, recipe_named
from build.workspace import Workspace, training_text

QUICK_HELD_OUT_WINDOWS = 8
# Tokens per second on two shared cores (AVX-512 bfloat16), for the estimate printed before a run.
EXPECTED_RATE = {"target": 2_000, "draft": 5_000}


@dataclass
class Run:
    """A model in training with all that its next step needs."""

    recipe: Recipe
    model: LlamaForCausalLM
    optimizer: torch.optim.Optimizer
    loss: Loss
    progress: Progress

    @property
    def device(self) -> torch.device:
        """Where the model's parameters are."""
        return self.model.device


def begin_run(recipe: Recipe, corpus_sha256: str, teacher: LlamaForCausalLM | None, device: str) -> Run:
    """A run at step 0 with seeded parameters."""
    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM(recipe.shape.config())
    torch.nn.Module.to(model, device).train()
    loss = text_loss(model) if teacher is None else distillation_loss(model, teacher, recipe.teacher_weight)
    return Run(recipe, model, _optimizer(model, recipe), loss, Progress(recipe.plan, corpus_sha256))


def resume_run(run: Run, path: Path) -> None:
    """Brings `run` to the state of the checkpoint at `path`; its next step equals that of the saved run."""
    state = load_checkpoint(path)
    progress = progress_of(state)
    if progress.corpus_sha256 != run.progress.corpus_sha256:
        raise BuildError(f"the checkpoint {path} was trained on another corpus; delete it to start anew")
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    run.progress = progress


def compile_loss(run: Run) -> None:
    """Fuses the loss's many small operations; measured here: 1.3 x the tokens per second, for a minute's work."""
    if can_compile(run.device):
        run.loss = torch.compile(run.loss, dynamic=False)


def train_step(run: Run, stream: Tokens) -> float:
    """One optimizer step on the batch of the run's present step; returns its loss in nats per token."""
    windows = _windows(run, stream).to(run.device)
    for group in run.optimizer.param_groups:
        group["lr"] = run.progress.plan.rate(run.progress.step)
    with torch.autocast(run.device.type, torch.bfloat16):
        loss = run.loss(windows)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), run.recipe.max_grad_norm)
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.progress.step += 1
    return float(loss.detach())


def train(run: Run, train_stream: Tokens, held_out: Tokens, path: Path) -> bool:
    """Steps until the plan's end or a signal, with checkpoints at `path`; returns whether the plan is done."""
    return run_steps(
        run.progress, lambda: {"loss": train_step(run, train_stream)}, lambda: _checkpoint(run, held_out, path)
    )


def load_teacher(recipe: Recipe, workspace: Workspace, device: str) -> LlamaForCausalLM | None:
    """The trained model whose distribution p is distilled, when the recipe gives it weight."""
    if recipe.teacher is None or recipe.teacher_weight == 0:
        return None
    folder = workspace.models / recipe.teacher
    if not (folder / "config.json").exists():
        raise BuildError(f"{recipe.name} is distilled from models/{recipe.teacher}, which is not there; train it first")
    teacher: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.nn.Module.to(teacher, device).eval().requires_grad_(False)
    return teacher


def train_model(name: str, workspace: Workspace, any_corpus: bool, finish: bool = False) -> bool:
    """Trains the model `name` from its checkpoint, if there is one; returns whether its plan is done."""
    recipe = recipe_named(name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = training_text(workspace, name, any_corpus)
    run = begin_run(recipe, text.corpus.sha256, load_teacher(recipe, workspace, device), device)
    path = workspace.checkpoint(name)
    if path.exists():
        resume_run(run, path)
    if finish:
        cut(run.progress)
    _announce(run)
    compile_loss(run)
    return train(run, text.train, text.held_out, path)


def main() -> None:
    """Command line: `python -m build.train target|draft`."""
    parser = argparse.ArgumentParser(prog="python -m build.train", description=__doc__)
    parser.add_argument("model", help="target or draft")
    parser.add_argument("--finish-now", action="store_true", help="begin the last phase at the checkpoint's step")
    parser.add_argument(
        "--any-corpus", action="store_true", help="train on another standard library than the recorded one"
    )
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: all)")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    train_model(options.model, Workspace(), options.any_corpus, options.finish_now)


def _optimizer(model: LlamaForCausalLM, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW; gains of norms are not decayed."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    gains = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.plan.peak_rate, betas=(0.9, 0.95), fused=True)


def _windows(run: Run, stream: Tokens) -> torch.Tensor:
    """The batch (B, n + 1) of the present step."""
    plan, step = run.progress.plan, run.progress.step
    phase = plan.phase(step)
    return batch(stream, run.recipe.seed, step - phase.first, plan.step_tokens // phase.length, phase.length)


def _checkpoint(run: Run, held_out: Tokens, path: Path) -> None:
    """Saves the run and logs a quick held-out loss."""
    save_checkpoint(path, run.model, run.optimizer, run.progress)
    loss = held_out_loss(run.model, held_out, QUICK_HELD_OUT_WINDOWS)
    bands = " ".join(f"{band}: {value:.3f}" for band, value in loss.bands.items())
    print(f"checkpoint at step {run.progress.step}, held-out loss {loss.mean:.3f} ({bands})", flush=True)


def _announce(run: Run) -> None:
    """Says what the run will cost before it costs anything."""
    plan, step = run.progress.plan, run.progress.step
    tokens = (plan.steps - step) * plan.step_tokens
    minutes = tokens / EXPECTED_RATE.get(run.recipe.name, 2_000) / 60
    millions = sum(parameter.numel() for parameter in run.model.parameters()) / 1e6
    print(
        f"{run.recipe.name}: {millions:.2f} M parameters, {tokens / 1e6:.2f} M tokens from step {step}, "
        f"about {minutes:.0f} minutes on two CPU cores, on {run.device.type}",
        flush=True,
    )


if __name__ == "__main__":
    run_command(main)
