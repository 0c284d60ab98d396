"""Saves and restores a run, all or nothing; it does not know what is trained."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from build.errors import BuildError
from build.recipe import Plan


@dataclass
class Progress:
    """How far a run is: the next step, seconds trained so far over all its sessions, and the plan it follows.

    settings_sha256: of whatever else a resumed run must have in common with this one. losses: of the last steps, by
    name.
    """

    plan: Plan
    corpus_sha256: str
    step: int = 0
    wall_s: float = 0.0
    settings_sha256: str = ""
    losses: dict[str, float] = field(default_factory=dict)


def save_checkpoint(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Writes the run's state beside `path` and then renames it, so that a crash leaves the old file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "progress": asdict(progress)}
    torch.save(state, partial)
    partial.replace(path)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The state written by `save_checkpoint`, on the CPU."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, UnpicklingError) as error:
        raise BuildError(f"the checkpoint {path} cannot be read; delete it to start anew") from error
    return state


def progress_of(state: dict[str, Any]) -> Progress:
    """The progress recorded in a checkpoint's state."""
    fields = dict(state["progress"])
    return Progress(plan=Plan(**fields.pop("plan")), **fields)
