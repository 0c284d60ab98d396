"""A call of an engine on its way: what was asked, until when, and how to answer."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from orchestrator.core.errors import ServingError
from orchestrator.core.types import Acceptance, Distribution, DraftResponse
from orchestrator.wire.context import Delta
from orchestrator.wire.drafter import DraftRequest
from orchestrator.wire.target import StepRequest
from runtime.kv.sequences import CachedSequence, SequenceTable

log = logging.getLogger(__name__)

WARM_UP_LIMIT_S = 120.0

Answer = Acceptance | DraftResponse
Reply = Callable[[Answer | ServingError], None]
Request = TypeVar("Request", StepRequest, DraftRequest)


@dataclass(eq=False)
class EngineCall(Generic[Request]):
    """One step or draft call; `sequence` is set by the engine that opens it.

    deadline_s: when an answer is due at the latest, by time.monotonic(). drawn_from: q of the tokens drafted so far.
    """

    request: Request
    deadline_s: float
    on_answer: Reply
    arrived_s: float = field(default_factory=time.monotonic)
    sequence: CachedSequence | None = field(default=None, init=False)
    answered: bool = field(default=False, init=False)
    drawn_from: list[Distribution] = field(default_factory=list, init=False)

    def reply(self, answer: Answer | ServingError) -> None:
        """Answer the call, once; a receiver that fails harms nobody else in the pass."""
        self.answered = True
        try:
            self.on_answer(answer)
        except Exception:
            log.exception("the answer to sequence %d could not be delivered", self.sequence_id)

    @property
    def delta(self) -> Delta:
        """The committed context that came with the call."""
        return self.request.delta

    @property
    def sequence_id(self) -> int:
        """Whose call this is."""
        return self.request.delta.sequence_id

    @property
    def opened(self) -> CachedSequence:
        """The sequence of a job that is open."""
        assert self.sequence is not None
        return self.sequence


def submit_and_wait(submit: Callable[[Request, float, Reply], None], request: Request) -> Answer:
    """Submit a warm-up call and wait for its answer; raises the error that is answered.

    submit: of an engine's thread or line.
    """
    answers: queue.SimpleQueue[Answer | ServingError] = queue.SimpleQueue()
    submit(request, time.monotonic() + WARM_UP_LIMIT_S, answers.put)
    answer = answers.get(timeout=WARM_UP_LIMIT_S + 1.0)
    if isinstance(answer, ServingError):
        raise answer
    return answer


class Engine(Protocol[Request]):
    """What runs in an engine thread: one forward pass at a time over all jobs at hand."""

    @property
    def sequences(self) -> SequenceTable:
        """The sequences that it holds; the thread drops those that have ended or fallen silent."""

    def preparation(self, request: Request) -> Callable[[], None] | None:
        """Return what is to be done before the request is submitted, on another thread; None as a rule."""

    def advance(self, jobs: list[EngineCall[Request]]) -> list[EngineCall[Request]]:
        """Run one pass, answer the jobs that are done, and return those that need another pass."""
