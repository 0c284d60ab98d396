"""Runs: the engine runs the steps of a sequence one after another, and the caller takes several in one call.

A call costs about as much as a forward pass of a small model. In a run, the engine's thread proposes the next tree as
soon as a step is answered, so that calls, text and responses overlap with the passes.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from orchestrator.core.errors import UnknownSequence
from orchestrator.core.messages.run import RunOptions, TakeSteps
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.proposal import Proposer
from orchestrator.core.types import EngineStatus
from runtime.engine.run import Answer, Reply, Run
from runtime.engine.target_thread import TargetThread

log = logging.getLogger(__name__)

#: Steps are collected for HOLD_S times the number of runs, at most MAX_HOLD_S, before they are answered. An answer
#: takes the loop, Triton and the client about 2 ms of CPU time, as much as a small pass. With one run, a reader sees
#: the text grow 60 times a second.
HOLD_S, MAX_HOLD_S = 0.016, 0.100

StepCall = StepRequest | TakeSteps


class Proposers(Protocol):
    """What builds the proposers of runs."""

    def __call__(self, request: StepRequest) -> Proposer:
        """Return the proposer of a run; raises RequestError. It may be slow: no other request waits for it."""

    def ended(self, request: StepRequest, output: Sequence[int]) -> None:
        """Note that a run has ended; output: the tokens that its caller has taken. Must not block."""


class Runs:
    """An engine thread that also serves runs; has the interface of `EngineThread`."""

    def __init__(self, engine: TargetThread, proposers: Proposers) -> None:
        self._engine, self._proposers = engine, proposers
        self.kernels = engine.kernels
        self._after_pass: list[Callable[[], None]] = []
        self._lock = threading.Lock()  # of the next two: any thread may begin, release or take, and a run ends itself
        self._starting: dict[int, StepRequest] = {}  # the request that each sequence is preparing, unless released
        self._runs: dict[int, Run] = {}
        self._prepared: dict[StepRequest, Run] = {}
        self._answers: queue.SimpleQueue[tuple[Reply, Answer] | None] = queue.SimpleQueue()
        engine.after_pass(self._go_on)
        threading.Thread(target=self._deliver, name="answers", daemon=True).start()

    def preparation(self, request: StepCall) -> Callable[[], None] | None:
        """Return the work that must precede `submit`: compiling a run's grammar and making its first proposal."""
        if isinstance(request, TakeSteps) or not request.run:
            return None
        with self._lock:
            self._starting[request.delta.sequence_id] = request
        return partial(self._prepare, request, request.run)

    def submit(self, request: StepCall, deadline_s: float, on_answer: Reply) -> None:
        """Queue a step, begin a run, or take the steps of one; `on_answer` is called once."""
        if isinstance(request, TakeSteps):
            if run := self._runs.get(request.sequence_id):
                run.take(request.prefix_len, on_answer)
            else:
                on_answer(UnknownSequence(f"a run of sequence {request.sequence_id}"))
        elif request.run:
            self._begin(request, deadline_s, on_answer)
        else:
            self._engine.submit(request, deadline_s, on_answer)

    def release(self, sequence_id: int) -> None:
        """End a sequence."""
        with self._lock:
            self._starting.pop(sequence_id, None)
            run = self._runs.pop(sequence_id, None)
        if run:
            run.close()
            self._proposers.ended(run.request, run.output_taken)
        self._engine.release(sequence_id)

    def watch(self, report: Callable[[EngineStatus], None]) -> None:
        """Do as `EngineThread` does."""
        self._engine.watch(report)

    def on_broken(self, end: Callable[[], None]) -> None:
        """Do as `EngineThread` does."""
        self._engine.on_broken(end)

    def close(self) -> None:
        """Stop the engine; pending calls are answered."""
        self._engine.close()
        self._answers.put(None)

    def _prepare(self, request: StepRequest, options: RunOptions) -> None:
        try:
            matcher = self._engine.matcher(request.sampling)
            proposer = self._proposers(request)
            run = Run(request, options, proposer, matcher, self._after_pass.append, self._hold_s)
        except BaseException:
            self._end_start(request)
            raise
        self._prepared[request] = run

    def _begin(self, request: StepRequest, deadline_s: float, on_answer: Reply) -> None:
        run = self._prepared.pop(request)
        run.deadline_s = deadline_s  # before other threads see the run: they close those that are late
        for other in self._replaced_by(run, request):
            other.close()
        run.begin(
            self._engine,
            lambda reply, answer: self._answers.put((reply, answer)),
            partial(self._forget, request.delta.sequence_id),
            on_answer,
        )

    def _replaced_by(self, run: Run, request: StepRequest) -> list[Run]:
        """Register a run unless it was released; return the runs to close: those that are late or replaced."""
        now_s, sequence_id = time.monotonic(), request.delta.sequence_id
        is_wanted = self._end_start(request)
        with self._lock:
            late = [other for other, known in self._runs.items() if known.deadline_s < now_s and other != sequence_id]
            closed = [self._runs.pop(other) for other in late]
            if not is_wanted:
                return [*closed, run]
            if former := self._runs.get(sequence_id):
                closed.append(former)
            self._runs[sequence_id] = run
            return closed

    def _end_start(self, request: StepRequest) -> bool:
        """Note that a request is prepared; return False if its sequence was released or begun again meanwhile."""
        with self._lock:
            is_wanted = self._starting.get(request.delta.sequence_id) is request
            if is_wanted:
                del self._starting[request.delta.sequence_id]
            return is_wanted

    def _forget(self, sequence_id: int, run: Run) -> None:
        """Forget a run that has failed, unless its sequence has a new one."""
        with self._lock:
            if self._runs.get(sequence_id) is run:
                del self._runs[sequence_id]

    def _go_on(self) -> None:
        """Propose for every run that the last pass advanced, and send the answers that are due."""
        actions, self._after_pass[:] = list(self._after_pass), []
        for action in actions:
            action()
        with self._lock:
            runs = list(self._runs.values())
        for run in runs:
            run.answer_if_due()

    def _hold_s(self) -> float:
        return min(HOLD_S * len(self._runs), MAX_HOLD_S)

    def _deliver(self) -> None:
        """Send answers, on a thread of its own, since that takes longer than the engine's thread should wait."""
        while item := self._answers.get():
            reply, answer = item
            try:
                reply(answer)
            except Exception:
                log.exception("the steps of a run could not be delivered")
