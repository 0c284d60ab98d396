"""The engine thread: it owns its batch, gathers the calls of live sequences while that pays, and answers every call."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic

from orchestrator.core.errors import EngineError, EngineLost, ServingError, Unavailable
from orchestrator.core.types import EngineStatus
from runtime.engine.batching import BatchingPolicy
from runtime.engine.calls import Engine, EngineCall, Reply, Request

log = logging.getLogger(__name__)

REPORT_S = 0.5
SHUTTING_DOWN = "the engine is shutting down"
BROKEN = "the engine stopped on an internal error"


class EngineThread(Generic[Request]):
    """Runs an engine's passes over all calls at hand, one thread, from `start` to `close`.

    prepare: called first, on the thread.
    Invariant: every submitted job is answered exactly once, by its deadline or one pass after it.
    """

    def __init__(self, engine: Engine[Request], name: str, prepare: Callable[[], None] = lambda: None) -> None:
        self.batching = BatchingPolicy()
        self.num_passes = 0
        self.num_calls = 0
        self._engine: Engine[Request] = engine
        self._prepare = prepare
        self._inbox: queue.SimpleQueue[EngineCall[Request] | int | None] = queue.SimpleQueue()
        self._jobs: list[EngineCall[Request]] = []
        self._report: Callable[[EngineStatus], None] | None = None
        self._reported_s = 0.0
        self._refusal: ServingError | None = None
        self._on_broken: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def preparation(self, request: Request) -> Callable[[], None] | None:
        """Return what takes too long for this thread, and is to be done before `submit`; None as a rule."""
        return self._engine.preparation(request)

    def submit(self, request: Request, deadline_s: float, on_answer: Reply) -> None:
        """Queue a call; `on_answer` is called once, from the engine's thread (after `close` from the caller's).

        deadline_s: when the answer is due, by time.monotonic().
        """
        self._inbox.put(EngineCall(request, deadline_s, on_answer))
        if self._refusal:
            self._refuse_inbox(self._refusal)

    def release(self, sequence_id: int) -> None:
        """Queue the end of a sequence."""
        self._inbox.put(sequence_id)

    def watch(self, report: Callable[[EngineStatus], None]) -> None:
        """Let `report` have the engine's figures every REPORT_S, on the engine's thread; it must not raise."""
        self._report = report

    def on_broken(self, end: Callable[[], None]) -> None:
        """Let `end` be called, at least once, when the engine has stopped on an internal error and answered every call.

        Such an engine refuses whatever comes, so its process had better end and be started anew.
        """
        self._on_broken = end
        if isinstance(self._refusal, EngineLost):
            end()

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop after the present pass; what is still queued is answered with Unavailable."""
        self._inbox.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._prepare()
            while self._receive():
                self._expire()
                self._forget_idle()
                self._report_status()
                if self._jobs:
                    self._pass()
        except Exception:
            log.exception("the engine cannot trust its own books any more, and stops")
            self._refuse_all(EngineLost(BROKEN))
            self._on_broken()
        else:
            self._refuse_all(Unavailable(SHUTTING_DOWN))

    def _refuse_all(self, refusal: ServingError) -> None:
        """Answer the calls at hand and, from now on, every other."""
        self._refusal = refusal
        for job in self._jobs:
            if not job.answered:
                job.reply(refusal)
        self._refuse_inbox(refusal)

    def _refuse_inbox(self, refusal: ServingError) -> None:
        """Answer the calls that came in behind the end; whoever takes one out of the queue answers it."""
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(item, EngineCall):
                item.reply(refusal)

    def _receive(self) -> bool:
        """Take what has arrived; wait for a first job, and for those that `gather` expects. False at the end."""
        while True:
            wait_s = self.batching.wait_s(time.monotonic(), bool(self._jobs))
            try:
                item = self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()
            except queue.Empty:
                return True
            if item is None:
                return False
            self._take(item)

    def _take(self, item: EngineCall[Request] | int) -> None:
        if isinstance(item, int):
            self._end(item, "the sequence was released")
            self.batching.left(item)
            self._engine.sequences.drop(item)
        elif any(job.sequence_id == item.sequence_id for job in self._jobs):
            item.reply(Unavailable(f"sequence {item.sequence_id} has a call under way"))
        else:
            self.batching.arrived(item.sequence_id, item.arrived_s)
            self._jobs.append(item)

    def _expire(self) -> None:
        now_s = time.monotonic()
        for job in self._jobs:
            if job.deadline_s <= now_s:
                self.batching.left(job.sequence_id)
                self._engine.sequences.drop(job.sequence_id)
                job.reply(Unavailable("the deadline passed before the engine could answer"))
        self._jobs = [job for job in self._jobs if not job.answered]

    def _end(self, sequence_id: int, reason: str) -> None:
        """Answer the job of a sequence whose blocks are about to go."""
        for job in self._jobs:
            if job.sequence_id == sequence_id:
                job.reply(Unavailable(reason))
        self._jobs = [job for job in self._jobs if not job.answered]

    def _forget_idle(self) -> None:
        now_s = time.monotonic()
        self.batching.forget_idle(now_s)
        self._engine.sequences.drop_idle(now_s, {job.sequence_id for job in self._jobs})

    def _report_status(self) -> None:
        now_s = time.monotonic()
        if self._report and now_s - self._reported_s >= REPORT_S:
            self._reported_s = now_s
            self._report(self.status())

    def status(self) -> EngineStatus:
        """Return the engine's figures; they belong together when this is called on the engine's thread."""
        sequences = self._engine.sequences
        pool = sequences.pool
        return EngineStatus(
            blocks_held=pool.num_held,
            blocks_cached=pool.num_cached,
            blocks_free=pool.num_free,
            blocks_total=pool.num_blocks,
            num_sequences=len(sequences),
            num_passes=self.num_passes,
            num_calls=self.num_calls,
        )

    def _pass(self) -> None:
        began_s = time.monotonic()
        jobs = self._jobs
        # Before the answers: whoever has one sees the pass counted.
        self.num_passes += 1
        self.num_calls += len(jobs)
        self._jobs = self._advance(jobs)
        now_s = time.monotonic()
        waiting = {job.sequence_id for job in self._jobs}
        answered = [job.sequence_id for job in jobs if job.sequence_id not in waiting]
        self.batching.answered(answered, now_s, now_s - began_s)

    def _advance(self, jobs: list[EngineCall[Request]]) -> list[EngineCall[Request]]:
        """Run a pass; when it fails, each job runs alone, so that only the culprit is refused."""
        try:
            return self._engine.advance(jobs)
        except Exception as error:
            log.exception("a pass over %d requests failed", len(jobs))
            return self._fail(jobs[0], error) if len(jobs) == 1 else self._advance_alone(jobs)

    def _advance_alone(self, jobs: list[EngineCall[Request]]) -> list[EngineCall[Request]]:
        waiting = [job for job in jobs if not job.answered]
        for job in waiting:
            # The failed pass may have got half-way with its sequence; opening it again puts that right.
            job.sequence = None
        return [left for job in waiting for left in self._advance([job])]

    def _fail(self, job: EngineCall[Request], error: Exception) -> list[EngineCall[Request]]:
        self._engine.sequences.drop(job.sequence_id)
        if not job.answered:
            unknown = EngineError(f"the engine failed on this request: {type(error).__name__}")
            job.reply(error if isinstance(error, ServingError) else unknown)
        return []
