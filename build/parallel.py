"""Data-parallel training under torchrun: each process learns from a share of every batch, and gradients are added."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

#: How long a process may wait for the others: the first may work for hours while the others wait.
HOST_LIMIT = timedelta(hours=12)


@dataclass(frozen=True)
class Workers:
    """The processes of a run, which hold equal parameters.

    rank: this process's, from 0. size: the number of processes. host: their group for numbers on the host and for
    waiting, since NCCL ends a process that waits longer than ten minutes; None for a single process.
    """

    rank: int = 0
    size: int = 1
    host: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)

    @property
    def is_first(self) -> bool:
        """True in the process that writes files and prints."""
        return self.rank == 0

    def share(self, rows: Tensor) -> Tensor:
        """Return this process's rows of a batch, (B, …) → (b, …): every size-th one; there may be none."""
        return rows[self.rank :: self.size]

    def add_gradients(self, module: nn.Module, weight: float) -> None:
        """Replace each gradient by its sum over all processes, each times that process's own weight."""
        if self.size == 1:
            return
        for parameter in module.parameters():
            if parameter.requires_grad:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad * weight
                dist.all_reduce(gradient)
                parameter.grad = gradient

    def add(self, values: Mapping[str, float], names: Sequence[str], weight: float) -> dict[str, float]:
        """Return the sums of the named values over all processes, each times that process's own weight."""
        if self.size == 1:
            return dict(values)
        total = torch.tensor([weight * values.get(name, 0.0) for name in names], dtype=torch.float64)
        dist.all_reduce(total, group=self.host)
        return dict(zip(names, total.tolist(), strict=True))

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process."""
        return flag if self.size == 1 else self.add({"flag": float(flag)}, ("flag",), 1.0)["flag"] > 0.0

    @contextmanager
    def first_before_others(self) -> Iterator[None]:
        """Let the first process go through the block before the others: it makes the files that they read."""
        if not self.is_first:
            dist.barrier(group=self.host)
        yield
        if self.is_first and self.size > 1:
            dist.barrier(group=self.host)


@contextmanager
def joined_workers(device: str) -> Iterator[Workers]:
    """Yield the workers that torchrun has started; without torchrun, this process alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Workers()
        return
    gpu = torch.device(own_device(device)) if device.startswith("cuda") else None
    dist.init_process_group("nccl" if gpu else "gloo", device_id=gpu)
    try:
        host = dist.new_group(backend="gloo", timeout=HOST_LIMIT)
        yield Workers(dist.get_rank(), dist.get_world_size(), host)
    finally:
        dist.destroy_process_group()


def own_device(device: str) -> str:
    """Return this process's device: under torchrun, `cuda` is the GPU with the process's local rank."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" and "LOCAL_RANK" in os.environ else device
