"""The client of one TensorRT-LLM engine: all calls are in flight together, and one thread awaits the responses.

The engine forms its own batches. Requests are sent on their callers' threads and responses are read on one thread, as
in TensorRT-LLM's own Triton backend.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from orchestrator.core.errors import EngineLost, ServingError, Unavailable
from orchestrator.core.types import Acceptance, EngineStatus
from runtime.engine.calls import Answer, EngineCall, Reply, Request
from runtime.engine.client_thread import BROKEN, REPORT_S, ClientThread
from runtime.trtllm.adapter import Adapter, EngineRequest
from runtime.trtllm.contexts import Contexts
from runtime.trtllm.in_flight import Completed, InFlight, InFlightTable, Watchdog
from runtime.trtllm.transport import Response, Transport, wrap_error

log = logging.getLogger(__name__)

#: How late a deadline may be noticed; responses are read at once.
POLL_S = 0.02
SHUTDOWN_LIMIT_S = 10.0


class TrtllmClient(ClientThread[Request]):
    """Serves one engine from `start` to `close`.

    Invariant: every submitted call is answered exactly once, by its deadline or POLL_S after it.
    """

    FAILURE = "the engine has failed, and its client stops"

    def __init__(self, transport: Transport, adapter: Adapter[Request], name: str) -> None:
        super().__init__(name)
        self.num_passes = 0
        self.num_calls = 0
        self._transport = transport
        self._adapter: Adapter[Request] = adapter
        self._contexts = Contexts()
        self._in_flight: InFlightTable[Request] = InFlightTable()
        self._watchdog = Watchdog()
        self._changed = threading.Condition()
        self._is_closing = False
        self._is_lost = False

    def submit(self, request: Request, deadline_s: float, on_answer: Reply) -> None:
        """Hand a call to the engine; `on_answer` is called once, with the answer.

        It is called on the client's thread or, if the answer is known at once, on this one. deadline_s: when the answer
        is due, by time.monotonic().
        """
        call = EngineCall(request, deadline_s, on_answer)
        with self._changed:
            answer = self._refusal or self._begin(call)
        if answer is not None:
            call.reply(answer)

    def release(self, sequence_id: int) -> None:
        """End a sequence and cancel its request."""
        with self._changed:
            ended = self._end(lambda request: request.sequence_id == sequence_id)
            self._contexts.drop(sequence_id)
        for call in ended:
            call.reply(Unavailable("the sequence was released"))

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop, answer the calls in flight with Unavailable, and shut the engine down."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        # On a daemon thread: an engine that hangs must not keep the process from exiting.
        shutdown = threading.Thread(target=self._shut_down, name=f"{self._thread.name}-shutdown", daemon=True)
        shutdown.start()
        shutdown.join(SHUTDOWN_LIMIT_S)

    def status(self) -> EngineStatus:
        """Return the client's status; a batch of answers counts as a pass. The engine does not report its KV blocks."""
        return EngineStatus(0, 0, 0, 0, len(self._contexts), self.num_passes, self.num_calls)

    def _begin(self, call: EngineCall[Request]) -> Answer | ServingError | None:
        """Hand a call to the engine; return the answer if it is known already, or the error if the call is refused."""
        held = self._in_flight.of_sequence(call.sequence_id)
        if held and held.call:
            return Unavailable(f"sequence {call.sequence_id} has a call under way")
        try:
            request = self._adapter.to_request(call, self._contexts.join(call.delta, time.monotonic()))
            if not isinstance(request, EngineRequest):
                return request
            if held and held.serves(request):
                return self._continue(held, call)
            self._end(lambda other: other is held)
            self._watchdog.begin(time.monotonic(), is_idle=not self._in_flight.num_running)
            request_id = self._transport.enqueue(request.payload, call.deadline_s)
        except Exception as error:
            return self._refused(error)
        self._in_flight.add(InFlight(request_id, call.sequence_id, request, call))
        self._changed.notify_all()
        return None

    def _refused(self, error: Exception) -> ServingError:
        """Return the error of a call that could not be enqueued; an engine that takes no more requests is lost."""
        if isinstance(error, ServingError) or self._takes_requests():
            return wrap_error("TensorRT-LLM refused the request", error)
        log.error("the engine takes no more requests", exc_info=error)
        self._is_lost = True
        self._changed.notify_all()
        return EngineLost(BROKEN)

    def _takes_requests(self) -> bool:
        try:
            return self._transport.takes_requests()
        except Exception:
            return False

    def _continue(self, held: InFlight[Request], call: EngineCall[Request]) -> Answer | ServingError | None:
        """Return the answer that a call's stream already has, or None when the call must wait for more tokens."""
        held.call = call
        completed = self._complete([])
        return self._answer(completed[0], self._in_flight.num_running or 1) if completed else None

    def _complete(self, responses: list[Response]) -> list[Completed[Request]]:
        """Add responses and return the calls that they complete, for the caller to answer; it holds the lock."""
        completed = self._in_flight.complete(responses)
        self.num_calls += len(completed)
        for done in completed:
            self._contexts.touch(done.call.sequence_id, time.monotonic())
        return completed

    def _answer_calls(self) -> None:
        while self._await_calls():
            self._deliver(self._transport.responses(self._wait_limit_s()))
            self._expire()

    def _await_calls(self) -> bool:
        """Wait for a call and report meanwhile; return False when the client is closed. Raises EngineLost."""
        while True:
            self._report_status()
            with self._changed:
                self._contexts.drop_idle(time.monotonic(), self._in_flight.waiting_sequences)
                self._end(lambda request: not (request.call or request.sequence_id in self._contexts))
                self._changed.wait_for(self._has_work, REPORT_S)
                if self._is_lost:
                    raise EngineLost(BROKEN)
                if self._has_work():
                    return not self._is_closing

    def _has_work(self) -> bool:
        return bool(self._in_flight.num_running or self._is_closing or self._is_lost)

    def _wait_limit_s(self) -> float:
        """Return how long to wait for responses: until the next deadline, at most POLL_S."""
        with self._changed:
            due_s = min((request.call.deadline_s for request in self._in_flight if request.call), default=float("inf"))
        return min(max(due_s - time.monotonic(), 0.0), POLL_S)

    def _deliver(self, responses: list[Response]) -> None:
        """Answer the calls that these responses complete."""
        with self._changed:
            if responses:
                self._watchdog.end(time.monotonic())
            num_in_pass = self._in_flight.num_running
            completed = self._complete(responses)
            self.num_passes += bool(completed)
        for done in completed:
            done.call.reply(self._answer(done, num_in_pass))

    def _answer(self, done: Completed[Request], num_in_pass: int) -> Answer | ServingError:
        call, request, responses = done
        if error := next((response.error for response in responses if response.error), None):
            return error
        try:
            answer = self._adapter.from_result(call, request, [response.result for response in responses])
        except Exception as error:
            return wrap_error("TensorRT-LLM's answer was not understood", error)
        if not isinstance(answer, Acceptance):
            return answer
        forward_us = int((time.monotonic() - call.arrived_s) * 1e6)
        return replace(answer, forward_us=forward_us, num_in_pass=num_in_pass)

    def _expire(self) -> None:
        now_s = time.monotonic()
        with self._changed:
            late = self._end(lambda request: request.call is not None and request.call.deadline_s <= now_s)
            self._is_lost |= self._transport.owns_engine and self._watchdog.is_lost(now_s, len(late))
        for call in late:
            call.reply(Unavailable("the deadline passed before the engine could answer"))

    def _end(self, condition: Callable[[InFlight[Request]], bool]) -> list[EngineCall[Request]]:
        """Remove requests, cancel those that the engine still works on, and return the calls left to answer."""
        removed = self._in_flight.remove(condition)
        for request in removed:
            if request.is_final:
                continue
            try:
                self._transport.cancel(request.request_id)
            except Exception:  # if the engine is broken, waiting for its responses will show it
                log.exception("request %d could not be cancelled", request.request_id)
        return [request.call for request in removed if request.call]

    def _refuse_all(self, refusal: ServingError) -> None:
        """Answer the calls in flight and, from now on, every new call with `refusal`."""
        with self._changed:
            self._refusal = refusal
            ended = self._end(lambda request: True)
        for call in ended:
            call.reply(refusal)

    def _shut_down(self) -> None:
        try:
            self._transport.shut_down()
        except Exception:
            log.exception("the engine could not be shut down")
