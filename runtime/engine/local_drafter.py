"""A drafter in the target's process, without a thread of its own: the thread that needs a draft runs its pass.

Switching to another thread and back costs about as much as a level of a small draft tree; calling another process costs
more than the whole tree.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from orchestrator.core.context import Context
from orchestrator.core.errors import EngineError, ServingError, Unavailable
from orchestrator.core.messages.drafter import DraftRequest
from orchestrator.core.types import DraftCounts, DraftResponse, EngineStatus
from runtime.engine.calls import Answer, Engine, EngineCall, Progress
from runtime.engine.passes import Passes
from runtime.models.native.draft_calls import NativeDraft
from runtime.models.native.drafters import ContinuedDraft, NativeDrafter


class DraftingEngine(Engine[DraftRequest], Protocol):
    """The engine of a head or of a draft model."""

    def is_native(self, request: DraftRequest) -> bool:
        """Return whether native code can make the next drafts by itself, between the steps of a burst."""

    def continued(self, request: DraftRequest, context: Context, num_ahead: int) -> ContinuedDraft | None:
        """Return how native code can continue drafting after a context; None: the drafter has not read all of it.

        request: an earlier call. num_ahead: maximum tokens that the burst may commit.
        """

    def burst_drafter(self, drafts: Sequence[NativeDraft]) -> NativeDrafter:
        """Return what native code needs to call the drafter in a burst."""


class LocalDrafter:
    """Answers draft calls; implements `orchestrator.drafting.drafter_clients.Drafter`.

    counts: its calls so far, and the drafts that bursts have made with it.
    Invariant: one thread at a time runs a pass; all calls that are waiting when it begins share it.
    """

    def __init__(self, engine: DraftingEngine) -> None:
        self.kernels = engine.kernels
        self.counts = DraftCounts()
        self.engine, self._passes = engine, Passes(engine)
        # Calls, and ids of sequences that have ended.
        self._inbox: queue.SimpleQueue[EngineCall[DraftRequest] | int] = queue.SimpleQueue()
        self._calls: list[EngineCall[DraftRequest]] = []  # received but not answered yet
        self._lock = threading.Lock()
        self._borrower: Progress | None = None

    def draft(self, request: DraftRequest) -> DraftResponse:
        """Make a call and return its answer, by its deadline or one pass later; raises ServingError."""
        return self.begin(request)()

    def begin(self, request: DraftRequest) -> Callable[[], DraftResponse]:
        """Queue a call for the next pass; return a function that waits for the answer, and runs the pass if need be."""
        answers: queue.SimpleQueue[Answer | ServingError] = queue.SimpleQueue()
        call = EngineCall(request, time.monotonic() + request.deadline_ms / 1000, answers.put)
        self._inbox.put(call)
        return partial(self._answer, call, answers)

    def _answer(
        self, call: EngineCall[DraftRequest], answers: queue.SimpleQueue[Answer | ServingError]
    ) -> DraftResponse:
        while not call.answered:
            with self._take_back():
                if not call.answered:
                    self._run_pass()
        answer = answers.get_nowait()
        if isinstance(answer, ServingError):
            self.counts.num_failed += isinstance(answer, EngineError)
            raise answer
        assert isinstance(answer, DraftResponse)
        return answer

    def is_native(self, request: DraftRequest) -> bool:
        """Return whether native code can make the next drafts by itself, between the steps of a burst."""
        return self.engine.is_native(request)

    @contextmanager
    def lend(self, borrower: Progress) -> Iterator[DraftingEngine]:
        """Lend the engine to a burst of the target; a call that arrives meanwhile ends the burst.

        borrower: of the target's engine.
        """
        with self._lock:
            self._receive()
            self._borrower = borrower
            try:
                yield self.engine
            finally:
                self._borrower = None

    def count(self, num_drafts: int, num_passes: int) -> None:
        """Count the drafts that a burst has made; the burst calls this while it has the engine."""
        self.counts.num_calls += num_drafts
        self._passes.progress.num_calls += num_drafts
        self._passes.progress.num_passes += num_passes

    @contextmanager
    def _take_back(self) -> Iterator[None]:
        """Hold the lock; a burst that has borrowed the engine runs no more steps meanwhile."""
        borrower = self._borrower
        if borrower:
            borrower.add_waiting(1)
        try:
            with self._lock:
                yield
        finally:
            if borrower:
                borrower.add_waiting(-1)

    def release(self, sequence_id: int) -> None:
        """Queue the end of a sequence, so that the caller need not wait for a pass."""
        self._inbox.put(sequence_id)

    def status(self) -> EngineStatus:
        """Forget the sequences that have ended or are idle, and return the engine's status."""
        with self._lock:
            self._receive()
            busy = {call.sequence_id for call in self._calls}
            self._passes.engine.sequences.drop_idle(time.monotonic(), busy)
            return self._passes.status()

    def _receive(self) -> None:
        """Take the calls that have arrived, and forget the sequences that have ended. Caller holds the lock."""
        while not self._inbox.empty():
            item = self._inbox.get_nowait()
            if isinstance(item, int):
                self._passes.engine.sequences.drop(item)
            else:
                self._calls.append(item)
                self.counts.num_calls += 1

    def _run_pass(self) -> None:
        """Run a pass over the waiting calls, and refuse those that are late. Caller holds the lock."""
        self._receive()
        now_s = time.monotonic()
        for call in self._calls:
            if call.is_late(now_s):
                self.counts.num_late += 1
                self._passes.engine.sequences.drop(call.sequence_id)
                call.reply(Unavailable("the deadline passed before the drafter could answer"))
        if waiting := [call for call in self._calls if not call.answered]:
            waiting = self._passes.run(waiting)
        self._calls = waiting
