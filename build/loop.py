"""Steps until a plan's end or a signal, with log lines and checkpoints; it does not know what a step trains."""

import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import FrameType
from typing import Self

import torch

from build.checkpoint import Progress

CHECKPOINT_EVERY_S = 300.0
LOG_EVERY_STEPS = 20


class Stopper:
    """Turns SIGINT or SIGTERM into a wish to stop after the present step, until it is left."""

    def __init__(self) -> None:
        self.wanted = False

    def __enter__(self) -> Self:
        self._before = [(number, signal.signal(number, self._note)) for number in (signal.SIGINT, signal.SIGTERM)]
        return self

    def __exit__(self, *reason: object) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.wanted = True


class Pace:
    """Logs losses, rate and time left, and says when the next checkpoint is due."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.losses: list[Mapping[str, float]] = []
        self.logged_at = self.saved_at = time.monotonic()

    def observe(self, losses: Mapping[str, float]) -> None:
        """Takes in one step's losses by name; writes a line every `LOG_EVERY_STEPS` steps."""
        self.losses.append(losses)
        if len(self.losses) == LOG_EVERY_STEPS:
            self._log()

    def checkpoint_due(self) -> bool:
        """True every five minutes."""
        if time.monotonic() - self.saved_at < CHECKPOINT_EVERY_S:
            return False
        self.saved_at = time.monotonic()
        return True

    def _log(self) -> None:
        now, progress, count = time.monotonic(), self.progress, len(self.losses)
        rate = count * progress.plan.step_tokens / (now - self.logged_at)
        left_s = (progress.plan.steps - progress.step) * progress.plan.step_tokens / rate
        means = {name: sum(losses[name] for losses in self.losses) / count for name in self.losses[0]}
        told = " ".join(f"{name} {mean:.3f}" for name, mean in means.items())
        print(
            f"step {progress.step}/{progress.plan.steps} {told} "
            f"lr {progress.plan.rate(progress.step - 1):.2e} {rate:.0f} tokens/s, {left_s / 60:.0f} min left",
            flush=True,
        )
        self.losses, self.logged_at = [], now


def run_steps(progress: Progress, step: Callable[[], Mapping[str, float]], save: Callable[[], None]) -> bool:
    """Calls `step` until the plan's end or a signal, `save` now and then and at the end; returns whether it is done."""
    pace = Pace(progress)
    with Stopper() as stopper:
        while progress.step < progress.plan.steps and not stopper.wanted:
            begin_s = time.monotonic()
            pace.observe(step())
            progress.wall_s += time.monotonic() - begin_s
            if pace.checkpoint_due():
                save()
        save()
    return progress.step >= progress.plan.steps


def can_compile(device: torch.device) -> bool:
    """True when torch.compile can work; says so when it cannot: the same numbers but for rounding, slower."""
    if device.type == "cpu" and not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        print("no C++ compiler was found: training goes on without torch.compile, slower")
        return False
    return True


def cut(progress: Progress) -> None:
    """Lets the last phase (long windows, final decay) begin at the present step."""
    if progress.plan.cut_step is None and progress.step < progress.plan.long_from:
        progress.plan = replace(progress.plan, cut_step=progress.step)
