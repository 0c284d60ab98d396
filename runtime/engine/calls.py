"""A call to an engine: its request, its deadline, and how to answer it."""

from __future__ import annotations

import ctypes
import logging
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Generic, Protocol, TypeVar

from orchestrator.core.errors import ServingError
from orchestrator.core.proposal import Step
from orchestrator.core.tree import BoolArray
from orchestrator.core.types import Acceptance, Distribution, DraftResponse
from orchestrator.wire.context import Delta
from orchestrator.wire.drafter import DraftRequest
from orchestrator.wire.target import StepRequest
from runtime.kv.sequences import CachedSequence, SequenceTable
from runtime.native.decoding import Continuation, Draft

log = logging.getLogger(__name__)

WARM_UP_LIMIT_S = 120.0
NOTHING_FURTHER = Continuation(max_tokens=1)

Answer = Acceptance | DraftResponse | list[Step]
Reply = Callable[[Answer | ServingError], None]
Request = TypeVar("Request", StepRequest, DraftRequest)


@dataclass(frozen=True, eq=False)
class SeveralSteps(StepRequest):
    """A step that the engine may follow with more of them: it answers with a list of steps, or with one acceptance.

    max_steps: most steps. limit_s: the time after which none begins. further: how the sequence goes on in them.
    sources: of the nodes of the first tree.
    """

    max_steps: int = 1
    limit_s: float = 0.0
    further: Continuation = NOTHING_FURTHER
    sources: tuple[str, ...] = ()

    @classmethod
    def of(cls, request: StepRequest, **further: Any) -> SeveralSteps:
        """Return the step `request` with what may follow it."""
        return cls(**{each.name: getattr(request, each.name) for each in fields(StepRequest)}, **further)


@dataclass(frozen=True, eq=False)
class GuidedStep(StepRequest):
    """A step under a grammar. legal: (m + 1, V), the tokens that the grammar allows at the root and at every node."""

    legal: BoolArray = field(kw_only=True)

    @classmethod
    def of(cls, request: StepRequest, legal: BoolArray) -> GuidedStep:
        """Return the step `request` under a grammar."""
        return cls(**{each.name: getattr(request, each.name) for each in fields(StepRequest)}, legal=legal)


@dataclass(eq=False)
class StepsMade:
    """The steps that native code has made for a call that is not answered yet.

    draft: what it has drafted behind them. answer_by_s: when they are to be answered, by time.monotonic(). num_tokens:
    how many the steps commit. noted_s: when the last one had been made; before the first, when the call arrived.
    """

    draft: Draft
    answer_by_s: float
    noted_s: float
    steps: list[Step] = field(default_factory=list)
    num_tokens: int = 0


@dataclass
class Progress:
    """What an engine and its thread tell each other.

    num_passes, num_calls: passes made, and the calls in them. num_waiting: what waits to be received by the engine's
    thread; while it is not 0, no further step of SeveralSteps begins.
    """

    num_passes: int = 0
    num_calls: int = 0
    num_waiting: ctypes.c_int32 = field(default_factory=ctypes.c_int32)


@dataclass(eq=False)
class EngineCall(Generic[Request]):
    """A step or draft call. deadline_s: latest time of the answer, by time.monotonic().

    sequence: set by the engine that opens it. made: the steps made so far, None = none yet. q, score: the distributions
    that the tokens drafted so far were sampled from, and the log-confidence of their path.
    """

    request: Request
    deadline_s: float
    on_answer: Reply
    arrived_s: float = field(default_factory=time.monotonic)
    sequence: CachedSequence | None = field(default=None, init=False)
    answered: bool = field(default=False, init=False)
    made: StepsMade | None = field(default=None, init=False)
    q: list[Distribution] = field(default_factory=list, init=False)
    score: float = field(default=0.0, init=False)

    def is_late(self, now_s: float) -> bool:
        """Return whether the call can be refused: not once a token is sampled, whose value may have cost the time."""
        return self.deadline_s <= now_s and not (self.q or self.made)

    def reply(self, answer: Answer | ServingError) -> None:
        """Answer the call; called once. An error in `on_answer` is logged, so that the pass goes on."""
        self.answered = True
        try:
            self.on_answer(answer)
        except Exception:
            log.exception("the answer to sequence %d could not be delivered", self.sequence_id)

    def answer_made(self) -> bool:
        """Answer with the steps that have been made, if there are any; return whether the call is answered."""
        if self.made and not self.answered:
            self.reply(self.made.steps)
        return self.answered

    @property
    def delta(self) -> Delta:
        """The committed context that came with the call."""
        return self.request.delta

    @property
    def sequence_id(self) -> int:
        """The sequence that the call belongs to."""
        return self.request.delta.sequence_id

    @property
    def opened(self) -> CachedSequence:
        """The sequence of a call that has been opened."""
        assert self.sequence is not None
        return self.sequence


class Engine(Protocol[Request]):
    """The engine that an engine thread runs: one forward pass at a time over all waiting calls.

    progress: shared with the thread, which counts one pass of each `advance`; the engine counts further ones.
    """

    progress: Progress

    @property
    def kernels(self) -> str:
        """What computes the passes: torch or native."""

    @property
    def sequences(self) -> SequenceTable:
        """The live sequences; the thread drops those that have ended or are idle."""

    def advance(self, calls: list[EngineCall[Request]]) -> list[EngineCall[Request]]:
        """Run one pass, or several for SeveralSteps; answer the calls that are complete, and return the others."""


def submit_and_wait(submit: Callable[[Request, float, Reply], None], request: Request) -> Answer:
    """Submit a warm-up call and return its answer; raises the error that the engine answers with."""
    answers: queue.SimpleQueue[Answer | ServingError] = queue.SimpleQueue()
    submit(request, time.monotonic() + WARM_UP_LIMIT_S, answers.put)
    answer = answers.get(timeout=WARM_UP_LIMIT_S + 1.0)
    if isinstance(answer, ServingError):
        raise answer
    return answer
