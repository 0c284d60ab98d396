"""A drafter's call; knows neither Triton nor torch."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.messages.context import Delta
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import NO_HEAD_INPUT, HeadInput


@dataclass(frozen=True, eq=False)
class DraftRequest:
    """One call of a drafter.

    head: what a drafter that reads the target's hidden states needs besides the context.
    deadline_ms: how long the drafter may take, counted from when it receives the call; 0 = the engine's default limit.
    """

    delta: Delta
    sampling: Sampling
    max_nodes: int
    max_depth: int
    head: HeadInput = NO_HEAD_INPUT
    deadline_ms: int = 0


@dataclass(eq=False)
class DrafterUse:
    """How an engine keeps calling a drafter of its own process for a request, without the request's proposer.

    drafter: a `LocalDrafter`. request: the last call; the next ones have the same sampling, shape and limits.
    following: the draft after the last step of a burst; None if the burst has left no draft.
    num_read: the number of tokens that the drafter has read after the burst. The first hidden state that a head lacks
    is that of the last of these tokens.
    """

    drafter: object
    request: DraftRequest
    following: TokenTree | None = None
    num_read: int = 0
