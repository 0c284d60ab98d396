"""Trains all heads in one run that reads each batch's target states once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from build.data import Tokens
from build.errors import BuildError
from build.heads.losses import ALONE, RandomInputs, backward_by_depth, loss_of, sample_inputs
from build.heads.make import make_heads
from build.heads.settings import ABLATED, KINDS, Settings
from build.heads.target import Batch, FrozenTarget, computing_in
from build.parallel import Workers
from build.training import Progress, Run, adamw
from runtime.models.heads.modules.medusa import MedusaHeads

#: Options that set a field of the plan; the other fields have defaults.
PLAN_OPTIONS = {"tokens": "--tokens", "step_tokens": "--step-tokens"}
DEFAULTS = "build/heads/settings.py"


@dataclass
class HeadsRun(Run[nn.ModuleDict]):
    """The training run of heads. compiled_loss: `loss_of`, compiled, while windows are short.

    own_text: (m,), the target's own continuations, which every second step reads. None: every step reads `stream`.
    """

    settings: Settings
    target: FrozenTarget
    own_text: Tokens | None = None
    compiled_loss: Callable[..., Tensor] | None = None

    @property
    def heads(self) -> nn.ModuleDict:
        """The heads by name."""
        return self.model

    def peak_rate(self, group: Mapping[str, Any]) -> float:
        """Return the peak learning rate of the group's head; the plan's rate is a share of it."""
        return self.settings.part(group["head"]).peak_rate

    def clipped_modules(self) -> Iterable[nn.Module]:
        """Return the heads: the gradient norm of each is clipped separately."""
        return self.heads.values()

    def loss_names(self) -> Sequence[str]:
        """Return the names of the heads."""
        return list(self.heads)

    def text(self) -> Tokens:
        """Return the stream that the present step reads."""
        return self.stream if self.own_text is None or self.progress.step % 2 == 0 else self.own_text

    def resume(self, path: Path) -> None:
        """Restore the state saved at `path`; raises BuildError if it follows another plan, except for its cut.

        With another plan, every learning rate so far would have been different. A time limit may have shortened the
        saved plan when the run began; that does not make it another plan.
        """
        requested = self.progress.plan
        super().resume(path)
        if self.progress.plan.is_shortened:
            requested = replace(requested, tokens=self.progress.plan.tokens, is_shortened=True)
        for key, followed in asdict(replace(self.progress.plan, cut_step=requested.cut_step)).items():
            if followed != (wanted := getattr(requested, key)):
                raise BuildError(
                    f"{path} follows a plan of {key} {followed}, but {wanted} was requested "
                    f"({PLAN_OPTIONS.get(key, DEFAULTS)}); request {followed} to continue, or delete it to start anew"
                )

    def backward(self, windows: Tensor) -> dict[str, float]:
        """Add each head's gradients, one graph at a time; windows: (B, n + 1) int64."""
        losses = {}
        if self.compiled_loss and windows.shape[1] - 1 != self.progress.plan.short_length:
            self.compiled_loss = None  # compiling again for the few long windows would take longer than it saves
            self.target.compile(False)
        with computing_in(self.settings.dtype, self.target.device):
            batch = self.target.read(windows.to(self.target.device))
            for name, head in self.heads.items():
                inputs = sample_inputs(name, batch, self.settings, self._generator(name), self.workers)
                losses[name] = self._backward_of(name, head, batch, inputs)
        return {name: float(loss) for name, loss in losses.items()}

    def _backward_of(self, name: str, head: nn.Module, batch: Batch, inputs: RandomInputs) -> Tensor:
        if isinstance(head, MedusaHeads):  # not compiled: one graph for all heads would hold the logits of all
            return backward_by_depth(head, batch, self.settings.part(name), inputs.roots)
        loss = (self.compiled_loss or loss_of)(name, head, batch, self.settings, inputs)
        loss.backward()
        return loss.detach()

    def _generator(self, name: str) -> torch.Generator:
        """Return a head's generator for the present step: the same in a resumed run, and whatever else is trained."""
        number = (*KINDS, ABLATED).index(name)
        seed = (self.settings.seed * 1_000_003 + self.progress.step) * 64 + number
        return torch.Generator().manual_seed(seed % (1 << 63))

    def compile(self) -> None:
        """Fuse the many small operations of a step; measured: 1.3 s instead of 2.1 s, after minutes of compilation."""
        self.target.compile()
        self.compiled_loss = torch.compile(loss_of, dynamic=False)


def begin_run(
    settings: Settings,
    target: FrozenTarget,
    stream: Tokens,
    corpus_sha256: str,
    own_text: Tokens | None = None,
    workers: Workers = ALONE,
) -> HeadsRun:
    """Return a run at step 0 with seeded parameters. stream: (n,), the training text; own_text: the target's own."""
    heads = make_heads(target, settings, stream)
    progress = Progress(settings.plan, corpus_sha256, settings_sha256=f"{settings.sha256} {target.identity}")
    optimizer = adamw({name: list(head.parameters()) for name, head in heads.items()}, settings.weight_decay)
    run = HeadsRun(
        heads, [optimizer], progress, stream, settings.seed, settings.max_grad_norm, settings, target, own_text,
        workers=workers,
    )  # fmt: skip
    target.fit_scale(run.windows())
    return run
