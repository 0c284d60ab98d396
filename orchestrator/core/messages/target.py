"""A target step; knows neither Triton nor torch."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.messages.context import Delta
from orchestrator.core.messages.run import RunOptions
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Distribution, StepOptions


@dataclass(frozen=True, eq=False)
class StepRequest:
    """One target step.

    deadline_ms: how long the engine may take, counted from when it receives the call.
    q: the distribution from which each node of the tree was sampled; empty for deterministic drafts.
    run: begins a run of steps, for which the engine drafts by itself; the tree is bare.
    max_len: maximum tokens that the sequence will ever need slots for, including drafts; 0 = unknown.
    """

    delta: Delta
    tree: TokenTree
    sampling: Sampling
    options: StepOptions
    deadline_ms: int
    q: tuple[Distribution, ...] = ()
    run: RunOptions | None = None
    max_len: int = 0
