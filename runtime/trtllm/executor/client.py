"""The line to an executor: calls of all clients in flight together, one thread that awaits the answers.

The executor gathers its own batches. It is called from several threads, as the model of TensorRT-LLM's own Triton
backend calls it: requests go in from their callers, answers come out on one thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, Generic

from orchestrator.core.errors import EngineError, EngineLost, ServingError, Unavailable, first_line
from orchestrator.core.types import Acceptance, EngineStatus
from runtime.engine.calls import Answer, EngineCall, Reply, Request
from runtime.engine.thread import BROKEN, REPORT_S, SHUTTING_DOWN
from runtime.trtllm.contexts import Contexts
from runtime.trtllm.errors import wrap_error
from runtime.trtllm.in_flight import Adapter, Completed, EngineRequest, InFlight, InFlightTable
from runtime.trtllm.watchdog import Watchdog

log = logging.getLogger(__name__)

#: How late a deadline may be noticed; an answer is taken at once, however long this is.
POLL_S = 0.02
SHUTDOWN_LIMIT_S = 10.0


class ExecutorClient(Generic[Request]):
    """Serves one engine, from `start` to `close`; to its host it is what an EngineThread is.

    Invariant: every submitted job is answered exactly once, by its deadline or POLL_S after it.
    """

    def __init__(self, executor: Any, desk: Adapter[Request], name: str) -> None:
        self.num_passes = 0
        self.num_calls = 0
        self._executor = executor
        self._desk: Adapter[Request] = desk
        self._contexts = Contexts()
        self._flights: InFlightTable[Request] = InFlightTable()
        self._changed = threading.Condition()
        self._is_closing = False
        self._is_lost = False
        self._silence = Watchdog()
        self._refusal: ServingError | None = None
        self._report: Callable[[EngineStatus], None] | None = None
        self._reported_s = 0.0
        self._on_broken: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def preparation(self, request: Request) -> Callable[[], None] | None:
        """Return None: nothing that a call needs takes long here."""
        return None

    def submit(self, request: Request, deadline_s: float, on_answer: Reply) -> None:
        """Hand a call to the executor; `on_answer` is called once, from the line's thread (a refusal: from here).

        deadline_s: when the answer is due, by time.monotonic().
        """
        job = EngineCall(request, deadline_s, on_answer)
        with self._changed:
            answer = self._refusal or self._begin(job)
        if answer is not None:
            job.reply(answer)

    def release(self, sequence_id: int) -> None:
        """End a sequence; what the executor still does for it is cancelled."""
        with self._changed:
            ended = self._end(lambda flight: flight.sequence_id == sequence_id)
            self._contexts.drop(sequence_id)
        for job in ended:
            job.reply(Unavailable("the sequence was released"))

    def watch(self, report: Callable[[EngineStatus], None]) -> None:
        """Let `report` have the line's figures every REPORT_S, on its thread; it must not raise."""
        self._report = report

    def on_broken(self, end: Callable[[], None]) -> None:
        """Let `end` be called, at least once, when the executor has failed and every call is answered."""
        self._on_broken = end
        if isinstance(self._refusal, EngineLost):
            end()

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop, answer what is under way with Unavailable, and shut the executor down."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        # On a thread that may be left behind: an executor that hangs must not keep the process from its end.
        ending = threading.Thread(target=self._shut_down, name=f"{self._thread.name}-end", daemon=True)
        ending.start()
        ending.join(SHUTDOWN_LIMIT_S)

    def status(self) -> EngineStatus:
        """Return the line's figures; a pass is a batch of answers. The executor keeps its blocks to itself."""
        return EngineStatus(0, 0, 0, 0, len(self._contexts), self.num_passes, self.num_calls)

    def _begin(self, job: EngineCall[Request]) -> Answer | ServingError | None:
        """Hand a call to the executor; return an answer that needs no executor, or why there will be none."""
        held = self._flights.of(job.sequence_id)
        if held and held.job:
            return Unavailable(f"sequence {job.sequence_id} has a call under way")
        try:
            asked = self._desk.ask(job, self._contexts.joined(job.delta, time.monotonic()))
            if not isinstance(asked, EngineRequest):
                return asked
            if held and held.serves(asked):
                return self._go_on(held, job)
            self._end(lambda flight: flight is held)
            self._silence.begin(time.monotonic(), is_idle=not self._flights.num_flying)
            request_id: int = self._executor.enqueue_request(asked.request)
        except Exception as error:
            return self._not_begun(error)
        self._flights.begin(InFlight(request_id, job.sequence_id, asked, job))
        self._changed.notify_all()
        return None

    def _not_begun(self, error: Exception) -> ServingError:
        """Return the error of a call that the executor does not have; one that takes no calls any more is lost."""
        if isinstance(error, ServingError) or self._takes_calls():
            return wrap_error("TensorRT-LLM's request refused", error)
        log.error("the executor takes no requests any more", exc_info=error)
        self._is_lost = True
        self._changed.notify_all()
        return EngineLost(BROKEN)

    def _takes_calls(self) -> bool:
        try:
            return bool(self._executor.can_enqueue_requests())
        except Exception:
            return False

    def _go_on(self, held: InFlight[Request], job: EngineCall[Request]) -> Answer | ServingError | None:
        """Let a call have what its stream has brought by now; None when it must wait for it."""
        held.job = job
        landings = self._flights.land([])
        self.num_calls += len(landings)
        return next((self._answer(landing, self._flights.num_flying or 1) for landing in landings), None)

    def _run(self) -> None:
        try:
            while self._await_calls():
                self._deliver(self._executor.await_responses(timeout=timedelta(seconds=self._patience_s())))
                self._expire()
        except Exception:
            log.exception("the executor has failed, and the line stops")
            self._refuse_all(EngineLost(BROKEN))
            self._on_broken()
        else:
            self._refuse_all(Unavailable(SHUTTING_DOWN))

    def _await_calls(self) -> bool:
        """Wait for a call, reporting meanwhile; False at the end, EngineLost where it has come already."""
        while True:
            self._report_status()
            with self._changed:
                self._contexts.drop_idle(time.monotonic(), self._flights.busy)
                self._end(lambda flight: not (flight.job or flight.sequence_id in self._contexts))
                self._changed.wait_for(self._has_work, REPORT_S)
                if self._is_lost:
                    raise EngineLost(BROKEN)
                if self._has_work():
                    return not self._is_closing

    def _has_work(self) -> bool:
        return bool(self._flights.num_flying or self._is_closing or self._is_lost)

    def _patience_s(self) -> float:
        """Return how long answers may be awaited before somebody's deadline must be looked at."""
        with self._changed:
            due_s = min((flight.job.deadline_s for flight in self._flights if flight.job), default=float("inf"))
        return min(max(due_s - time.monotonic(), 0.0), POLL_S)

    def _deliver(self, responses: list[Any]) -> None:
        """Answer the calls that wait for these responses; those of cancelled calls belong to nobody."""
        with self._changed:
            if responses:
                self._silence.end(time.monotonic())
            num_in_pass = self._flights.num_flying
            landings = self._flights.land(responses)
        for landing in landings:
            landing.job.reply(self._answer(landing, num_in_pass))
        self.num_passes += bool(landings)
        self.num_calls += len(landings)

    def _answer(self, landing: Completed[Request], num_in_pass: int) -> Answer | ServingError:
        job, asked, responses = landing
        self._contexts.touch(job.sequence_id, time.monotonic())
        try:
            if failed := next((response for response in responses if response.has_error()), None):
                raise EngineError(f"TensorRT-LLM failed on this request: {first_line(failed.error_msg)}")
            answer = self._desk.answer(job, asked, [response.result for response in responses])
        except Exception as error:
            return wrap_error("TensorRT-LLM's request was not understood", error)
        if not isinstance(answer, Acceptance):
            return answer
        forward_us = int((time.monotonic() - job.arrived_s) * 1e6)
        return replace(answer, forward_us=forward_us, num_in_pass=num_in_pass)

    def _expire(self) -> None:
        now_s = time.monotonic()
        with self._changed:
            late = self._end(lambda flight: flight.job is not None and flight.job.deadline_s <= now_s)
            self._is_lost |= self._silence.is_lost(now_s, len(late))
        for job in late:
            job.reply(Unavailable("the deadline passed before the engine could answer"))

    def _end(self, chosen: Callable[[InFlight[Request]], bool]) -> list[EngineCall[Request]]:
        """Forget the chosen flights, cancel what the executor still does for them; return the calls left to answer."""
        ended = self._flights.end(chosen)
        for flight in ended:
            if flight.is_final:
                continue
            try:
                self._executor.cancel_request(flight.request_id)
            except Exception:  # a broken executor shows when its answers are awaited
                log.exception("request %d could not be cancelled", flight.request_id)
        return [flight.job for flight in ended if flight.job]

    def _refuse_all(self, refusal: ServingError) -> None:
        """Answer the calls under way and, from now on, every other."""
        with self._changed:
            self._refusal = refusal
            ended = self._end(lambda flight: True)
        for job in ended:
            job.reply(refusal)

    def _shut_down(self) -> None:
        try:
            self._executor.shutdown()
        except Exception:
            log.exception("the executor could not be shut down")

    def _report_status(self) -> None:
        now_s = time.monotonic()
        if self._report and now_s - self._reported_s >= REPORT_S:
            self._reported_s = now_s
            self._report(self.status())
