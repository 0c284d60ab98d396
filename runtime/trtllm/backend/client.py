"""The line to NVIDIA's Triton model `tensorrt_llm`: calls of all clients in flight together, each a blocking call.

Knows no Triton: what calls the model is handed in. The backend batches by itself.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, Protocol

import numpy as np

from orchestrator.core.errors import ServingError, Unavailable
from orchestrator.core.types import Acceptance, EngineStatus, IdArray
from orchestrator.core.worker_pool import Call, CallState, WorkerPool
from orchestrator.wire.tensors import Incoming, Tensors
from runtime.engine.build import ModelCall
from runtime.engine.calls import Answer, EngineCall, Reply, Request
from runtime.engine.thread import REPORT_S, SHUTTING_DOWN
from runtime.trtllm.backend.tensors import OUTPUTS, stop_tensors
from runtime.trtllm.contexts import Contexts
from runtime.trtllm.errors import wrap_error

log = logging.getLogger(__name__)

#: How long the end of a request may take; nobody waits for it.
STOP_LIMIT_S = 5.0
#: How late a deadline may be noticed.
POLL_S = 0.05
LATE = "the deadline passed before the engine could answer"


@dataclass(frozen=True, eq=False)
class EngineRequest(Generic[Request]):
    """A call in the backend's tensors. request: what was asked for, as far as the backend can take it."""

    tensors: Tensors
    request: Request
    outputs: tuple[str, ...] = OUTPUTS


class Adapter(Protocol[Request]):
    """What turns calls into the backend's tensors, and its responses into answers."""

    def ask(self, request: Request, context_ids: IdArray) -> EngineRequest[Request] | Answer:
        """Return the backend's tensors, or an answer that needs no call; raises ServingError to refuse the call."""

    def answer(self, request: Request, context_ids: IdArray, responses: Sequence[Incoming]) -> Answer:
        """Return what the responses mean; raises EngineError when they mean nothing."""


@dataclass(eq=False)
class InFlight(Generic[Request]):
    """A call under way; request_id: with it the backend can be told to end the call."""

    job: EngineCall[Request]
    pool_call: Call[None] | None = None
    request_id: str = field(default_factory=lambda: str(secrets.randbits(62) + 1))


class BackendClient(Generic[Request]):
    """Serves one model of NVIDIA's backend, from `start` to `close`; to its host it is what an EngineThread is.

    Invariant: every submitted job is answered exactly once, by its deadline or soon after it.
    """

    def __init__(self, desk: Adapter[Request], call: ModelCall, num_threads: int, name: str) -> None:
        """num_threads: calls that are under way at once."""
        self.num_calls = 0
        self._desk: Adapter[Request] = desk
        self._call = call
        self._contexts = Contexts()
        self._flights: dict[int, InFlight[Request]] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._report: Callable[[EngineStatus], None] = lambda status: None
        # Daemons: a backend that hangs must not keep the process from its end.
        self._calls: WorkerPool[None] = WorkerPool(name, num_threads)
        self._stops: WorkerPool[None] = WorkerPool(f"{name}-stops", 1)
        self._keeper = threading.Thread(target=self._keep, name=f"{name}-keeper", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._keeper.start()

    def preparation(self, request: Request) -> Callable[[], None] | None:
        """Return None: nothing that a call needs takes long here."""
        return None

    def submit(self, request: Request, deadline_s: float, on_answer: Reply) -> None:
        """Hand a call to the backend; `on_answer` is called once, from a thread of the line (a refusal: from here).

        deadline_s: when the answer is due, by time.monotonic().
        """
        flight = InFlight(EngineCall(request, deadline_s, on_answer))
        if refusal := self._admit(flight):
            flight.job.reply(refusal)

    def release(self, sequence_id: int) -> None:
        """End a sequence; a call of it that is under way is stopped."""
        with self._lock:
            flight = self._flights.pop(sequence_id, None)
            self._contexts.drop(sequence_id)
        if flight:
            flight.job.reply(Unavailable("the sequence was released"))
            self._give_up(flight)

    def watch(self, report: Callable[[EngineStatus], None]) -> None:
        """Let `report` have the line's figures every REPORT_S, on a thread of its own; it must not raise."""
        self._report = report

    def on_broken(self, end: Callable[[], None]) -> None:
        """Do nothing: this process holds no engine that could break; Triton answers for the one that does."""

    def close(self) -> None:
        """Stop, and answer what is under way with Unavailable."""
        self._ended.set()
        with self._lock:
            flights, self._flights = list(self._flights.values()), {}
        for flight in flights:
            flight.job.reply(Unavailable(SHUTTING_DOWN))
        self._calls.close(SHUTTING_DOWN)
        self._stops.close(SHUTTING_DOWN)

    def status(self) -> EngineStatus:
        """Return the line's figures; a pass is a call. The backend keeps its blocks to itself."""
        return EngineStatus(0, 0, 0, 0, len(self._contexts), self.num_calls, self.num_calls)

    def _admit(self, flight: InFlight[Request]) -> Unavailable | None:
        with self._lock:
            if self._ended.is_set():
                return Unavailable(SHUTTING_DOWN)
            if flight.job.sequence_id in self._flights:
                return Unavailable(f"sequence {flight.job.sequence_id} has a call under way")
            self._flights[flight.job.sequence_id] = flight
            flight.pool_call = self._calls.start(partial(self._run, flight))
        return None

    def _run(self, flight: InFlight[Request]) -> None:
        if not self._is_awaited(flight):
            return
        answer: Answer | ServingError
        try:
            answer = self._answer(flight)
        except Exception as error:
            answer = wrap_error("the backend's answer was not understood", error)
        is_late = time.monotonic() >= flight.job.deadline_s and isinstance(answer, ServingError)
        if not self._is_awaited(flight, now_answered=True):
            return
        flight.job.reply(Unavailable(LATE) if is_late else answer)
        if is_late:
            self._stops.start(partial(self._stop, flight))

    def _is_awaited(self, flight: InFlight[Request], now_answered: bool = False) -> bool:
        """Tell whether somebody still waits for a call; `now_answered`: who is told so answers it."""
        with self._lock:
            is_awaited = self._flights.get(flight.job.sequence_id) is flight
            if is_awaited and now_answered:
                del self._flights[flight.job.sequence_id]
                self._contexts.touch(flight.job.sequence_id, time.monotonic())
                self.num_calls += 1
        return is_awaited

    def _answer(self, flight: InFlight[Request]) -> Answer:
        job = flight.job
        with self._lock:
            context_ids = np.array(self._contexts.joined(job.delta, time.monotonic()), np.int32)
        asked = self._desk.ask(job.request, context_ids)
        if not isinstance(asked, EngineRequest):
            return asked
        responses = self._call(asked.tensors, asked.outputs, flight.request_id, job.deadline_s - time.monotonic())
        answer = self._desk.answer(asked.request, context_ids, responses)
        if not isinstance(answer, Acceptance):
            return answer
        return replace(answer, forward_us=int((time.monotonic() - job.arrived_s) * 1e6))

    def _stop(self, flight: InFlight[Request]) -> None:
        try:
            self._call(stop_tensors(), OUTPUTS, flight.request_id, STOP_LIMIT_S)
        except Exception as error:  # it ends by itself then, at its length
            log.warning("request %s of the backend could not be stopped: %s", flight.request_id, error)

    def _give_up(self, flight: InFlight[Request]) -> None:
        """End a call that has begun; one that still waits for a thread will find out that nobody awaits it."""
        if flight.pool_call and flight.pool_call.state is not CallState.WAITING:
            self._stops.start(partial(self._stop, flight))

    def _keep(self) -> None:
        """Answer the calls whose deadline has passed, report, and forget silent sequences, until the end."""
        reported_s = time.monotonic()
        while not self._ended.wait(POLL_S):
            self._expire()
            if time.monotonic() - reported_s < REPORT_S:
                continue
            reported_s = time.monotonic()
            with self._lock:
                self._contexts.drop_idle(reported_s, self._flights)
            self._report(self.status())

    def _expire(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            late = [flight for flight in self._flights.values() if flight.job.deadline_s <= now_s]
            for flight in late:
                del self._flights[flight.job.sequence_id]
        for flight in late:
            flight.job.reply(Unavailable(LATE))
            self._give_up(flight)
