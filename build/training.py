"""A training run: steps up to the plan's end, resumable checkpoints, log lines; subclasses say what a step computes."""

from __future__ import annotations

import shutil
import signal
import sysconfig
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from build.data import Tokens, batch
from build.errors import BuildError
from build.parallel import Workers
from build.recipe import Plan

CHECKPOINT_EVERY_S = 400.0
#: The share of a time limit that a plan may fill, since a long run is slower than the short burst that is measured.
MARGIN = 0.85
LOG_EVERY_STEPS = 20

Model = TypeVar("Model", bound=nn.Module)


@dataclass
class Progress:
    """How far a run is: the plan it follows, the next step, and the seconds trained so far over all its sessions.

    settings_sha256: of everything else that a resumed run must share with this one. losses: moving averages by name.
    """

    plan: Plan
    corpus_sha256: str
    step: int = 0
    wall_s: float = 0.0
    settings_sha256: str = ""
    losses: dict[str, float] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """True when the plan has no more steps."""
        return self.step >= self.plan.steps

    @property
    def provenance(self) -> dict[str, Any]:
        """What a published model records of its training run."""
        return {
            "complete": self.is_complete,
            "plan_followed": asdict(self.plan),
            "torch": torch.__version__,
            "tokens": self.step * self.plan.step_tokens,
            "wall_minutes": round(self.wall_s / 60, 1),
        }

    def must_finish(self, limit_s: float) -> bool:
        """Return whether the time that is left is just enough for the last phase; limit_s: the run's limit, 0: none."""
        return bool(limit_s and self.step and self.wall_s > (1 - self.plan.long_share) * limit_s)

    def finish_now(self) -> None:
        """Begin the plan's last phase (long windows, final decay) at the present step."""
        if self.plan.cut_step is None and self.step < self.plan.long_from:
            self.plan = replace(self.plan, cut_step=self.step)


def load_checkpoint(path: Path) -> tuple[dict[str, Any], Progress]:
    """Return the states saved by `Run.save`, on the CPU, and the progress; raises BuildError for a damaged file."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, UnpicklingError) as error:
        raise BuildError(f"the checkpoint {path} cannot be read; delete it to start anew") from error
    fields = dict(state["progress"])
    return state, Progress(plan=Plan(**fields.pop("plan")), **fields)


@dataclass
class Run(ABC, Generic[Model]):
    """Everything that the next training step needs. stream: (n,), the training text as tokens.

    workers: the processes that train together; without torchrun this one alone.
    """

    model: Model
    optimizers: Sequence[torch.optim.Optimizer]
    progress: Progress
    stream: Tokens
    seed: int
    max_grad_norm: float
    workers: Workers = field(default=Workers(), kw_only=True)

    @abstractmethod
    def backward(self, windows: Tensor) -> dict[str, float]:
        """Add the gradients of a batch of windows, (B, n + 1) int64, and return the losses by name."""

    def peak_rate(self, group: Mapping[str, Any]) -> float:
        """Return the factor between the plan's learning rate and that of a parameter group."""
        return 1.0

    def clipped_modules(self) -> Iterable[nn.Module]:
        """Return the modules whose gradient norms are clipped separately."""
        return [self.model]

    def windows(self) -> Tensor:
        """Return the batch of the present step, (B, n + 1) int64: a function of the step alone."""
        plan, step = self.progress.plan, self.progress.step
        phase = plan.phase(step)
        return batch(self.text(), self.seed, step - phase.first, plan.step_tokens // phase.length, phase.length)

    def text(self) -> Tokens:
        """Return the stream that the present step reads."""
        return self.stream

    def train_step(self) -> dict[str, float]:
        """Run one optimizer step; return its losses in nats per token, by name."""
        rate = self.progress.plan.rate(self.progress.step)
        for group in chain.from_iterable(optimizer.param_groups for optimizer in self.optimizers):
            group["lr"] = rate * self.peak_rate(group)
        losses = self._gradients(self.windows())
        for module in self.clipped_modules():
            nn.utils.clip_grad_norm_(module.parameters(), self.max_grad_norm)
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad()
        self.progress.step += 1
        kept = self.progress.losses
        self.progress.losses = {name: kept.get(name, loss) * 0.95 + 0.05 * loss for name, loss in losses.items()}
        return losses

    def _gradients(self, windows: Tensor) -> dict[str, float]:
        """Compute the gradients of a batch, each process those of its share; return the losses over the whole batch."""
        mine = self.workers.share(windows)
        losses = self.backward(mine) if len(mine) else {}
        weight = len(mine) / len(windows)
        self.workers.add_gradients(self.model, weight)
        return self.workers.add(losses, self.loss_names(), weight)

    def loss_names(self) -> Sequence[str]:
        """Return the names of the losses, which a process without a share of a batch does not know otherwise."""
        return ("loss",)

    def save(self, path: Path) -> None:
        """Write the run's state beside `path`, then rename it, so that a crash leaves the old file intact."""
        if not self.workers.is_first:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        state = {"model": self.model.state_dict(), "optimizers": optimizers, "progress": asdict(self.progress)}
        torch.save(state, partial)
        partial.replace(path)

    def resume(self, path: Path) -> None:
        """Restore the state saved at `path`; the next step equals that of the saved run."""
        state, progress = load_checkpoint(path)
        for key in ("corpus_sha256", "settings_sha256"):
            if getattr(progress, key) != getattr(self.progress, key):
                raise BuildError(f"{path} is of another corpus, teacher, target or settings; delete it to start anew")
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = progress

    def measure_rate(self) -> float:
        """Return the tokens per second of a short burst: gradients of one batch, after one to warm up."""
        windows = self.workers.share(self.windows())
        if not len(windows):
            return 1.0
        self.backward(windows)
        began_s = time.perf_counter()
        self.backward(windows)  # it reads the losses, and so returns when the device is done
        rate = self.workers.size * windows[:, 1:].numel() / (time.perf_counter() - began_s)
        self.model.zero_grad()
        return rate

    def fit(self, path: Path, limit_s: float) -> float:
        """Resume from `path`, or begin with as many tokens as `limit_s` allows (0: all); return a short burst's rate.

        A shortened plan is saved at once, so that a run that is killed continues with it.
        """
        with self.workers.first_before_others():
            if path.exists():
                self.resume(path)
                return self.measure_rate()
            rate = self.measure_rate()
            self.progress.plan = self.progress.plan.shortened(int(MARGIN * rate * limit_s) if limit_s else None)
            self.save(path)
            return rate

    def announce(self, modules: Mapping[str, nn.Module], device: torch.device, rate: float, then: str = "") -> None:
        """Print what the run will cost before it starts.

        rate: tokens per second of a short burst. then: what follows the training, as the end of the sentence.
        """
        plan, step = self.progress.plan, self.progress.step
        tokens = (plan.steps - step) * plan.step_tokens
        sizes = {name: sum(each.numel() for each in module.parameters()) for name, module in modules.items()}
        print(
            f"{', '.join(f'{name} {size / 1e6:.2f} M' for name, size in sizes.items())} parameters; "
            f"{tokens / 1e6:.2f} M tokens from step {step}: about {tokens / rate / 60:.0f} minutes of training "
            f"on {device.type} by a burst of {rate:.0f} tokens/s{then}",
            flush=True,
        )

    def train(self, path: Path, after_save: Callable[[], None] = lambda: None, limit_s: float = 0.0) -> bool:
        """Train until the plan's end or a signal, with checkpoints at `path`; return whether the plan is complete.

        limit_s: seconds of training, earlier sessions included; the last phase begins in time to end by then; 0: none.
        """
        if self.progress.is_complete:
            return True
        logged_s = saved_s = time.monotonic()
        recent: list[dict[str, float]] = []
        with _received_signals() as signals:
            while not (self.progress.is_complete or self.workers.any(bool(signals))):
                if self.workers.any(self.progress.must_finish(limit_s)):
                    self.progress.finish_now()
                began_s = time.monotonic()
                recent.append(self.train_step())
                now_s = time.monotonic()
                self.progress.wall_s += now_s - began_s
                if len(recent) == LOG_EVERY_STEPS:
                    if self.workers.is_first:
                        _log(self.progress, recent, now_s - logged_s)
                    recent, logged_s = [], now_s
                if now_s - saved_s >= CHECKPOINT_EVERY_S:
                    self.save(path)
                    after_save()
                    saved_s = now_s
            self.save(path)
            after_save()
        return self.progress.is_complete


@contextmanager
def _received_signals() -> Iterator[list[int]]:
    """Yield a list that collects SIGINT and SIGTERM instead of ending the process."""
    received: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, frame: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _log(progress: Progress, recent: list[dict[str, float]], seconds: float) -> None:
    """Print mean losses of the last steps, the rate and the time left."""
    rate = len(recent) * progress.plan.step_tokens / seconds
    left_s = (progress.plan.steps - progress.step) * progress.plan.step_tokens / rate
    means = {name: sum(losses[name] for losses in recent) / len(recent) for name in recent[0]}
    print(
        f"step {progress.step}/{progress.plan.steps} {' '.join(f'{name} {mean:.3f}' for name, mean in means.items())} "
        f"lr {progress.plan.rate(progress.step - 1):.2e} {rate:.0f} tokens/s, {left_s / 60:.0f} min left",
        flush=True,
    )


def adamw(parameters: Mapping[str, list[nn.Parameter]], weight_decay: float) -> torch.optim.Optimizer:
    """Return AdamW with two groups per name (their `head`): matrices with weight decay, gains and biases without."""
    groups: list[dict[str, Any]] = []
    for name, named in parameters.items():
        matrices = [parameter for parameter in named if parameter.dim() >= 2]
        vectors = [parameter for parameter in named if parameter.dim() < 2]
        groups.append({"params": matrices, "weight_decay": weight_decay, "head": name})
        groups.append({"params": vectors, "weight_decay": 0.0, "head": name})
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)


def can_compile(device: torch.device) -> bool:
    """Return whether torch.compile works here; without it a run is slower, but the same up to rounding."""
    compilers = ("c++", "g++", "clang++") if device.type == "cpu" else ("gcc", "clang")
    lacks = [] if any(shutil.which(name) for name in compilers) else [f"a compiler ({', '.join(compilers)})"]
    if device.type != "cpu" and not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        lacks.append("Python.h")
    if lacks:
        print(f"training continues without torch.compile, more slowly: {' and '.join(lacks)} is missing")
    return not lacks
