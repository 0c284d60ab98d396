"""The requests that an engine is working on, the call that waits for each, and whether the engine is still alive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple

from runtime.engine.calls import EngineCall, Request
from runtime.trtllm.adapter import EngineRequest
from runtime.trtllm.transport import Response

#: An engine is lost when it has not responded for SILENT_S seconds and SILENT_CALLS deadlines have passed meanwhile.
SILENT_CALLS, SILENT_S = 3, 60.0


class Completed(NamedTuple, Generic[Request]):
    """A call, and the responses that answer it."""

    call: EngineCall[Request]
    request: EngineRequest
    responses: list[Response]


@dataclass(eq=False)
class InFlight(Generic[Request]):
    """One request at the engine.

    call: the call that waits; None while a stream runs ahead of its calls. responses: those that no call has had yet.
    """

    request_id: int
    sequence_id: int
    request: EngineRequest
    call: EngineCall[Request] | None
    responses: list[Response] = field(default_factory=list)
    is_final: bool = False

    def serves(self, request: EngineRequest) -> bool:
        """Return whether a call with this request can continue this stream: same options, same tokens so far."""
        mine, other = self.request.stream, request.stream
        is_same = mine is not None and other is not None and mine.key == other.key and self.request.ids == request.ids
        return is_same and bool(self.responses or not self.is_final)

    def add(self, response: Response) -> None:
        """Keep a response; one that is not final counts only in a stream, and only when it has tokens."""
        self.is_final = response.is_final
        if response.is_final or (self.request.stream and response.has_tokens):
            self.responses.append(response)

    def complete(self) -> Completed[Request] | None:
        """Return the waiting call with its responses and free the request for the next; None if either is missing."""
        if self.call is None or not self.responses:
            return None
        completed = Completed(self.call, self.request, self.responses)
        self.call, self.responses = None, []
        return completed


class InFlightTable(Generic[Request]):
    """All requests at one engine, by their ids; the client calls it with its lock held."""

    def __init__(self) -> None:
        self._requests: dict[int, InFlight[Request]] = {}

    def __iter__(self) -> Iterator[InFlight[Request]]:
        """Iterate over a copy, so that requests may be removed meanwhile."""
        return iter(list(self._requests.values()))

    @property
    def num_running(self) -> int:
        """How many requests the engine still works on."""
        return sum(not request.is_final for request in self)

    @property
    def waiting_sequences(self) -> set[int]:
        """The sequences with a call that waits."""
        return {request.sequence_id for request in self if request.call}

    def of_sequence(self, sequence_id: int) -> InFlight[Request] | None:
        """Return a sequence's request."""
        return next((request for request in self if request.sequence_id == sequence_id), None)

    def add(self, request: InFlight[Request]) -> None:
        """Add a request that the engine has received."""
        self._requests[request.request_id] = request

    def complete(self, responses: list[Response]) -> list[Completed[Request]]:
        """Add responses and return the calls that they complete; responses to removed requests are dropped."""
        for response in responses:
            if request := self._requests.get(response.request_id):
                request.add(response)
        completed = [done for request in self if (done := request.complete())]
        self.remove(lambda request: request.is_final and not request.responses)
        return completed

    def remove(self, condition: Callable[[InFlight[Request]], bool]) -> list[InFlight[Request]]:
        """Remove the requests that fulfil a condition, and return them."""
        removed = [request for request in self if condition(request)]
        for request in removed:
            del self._requests[request.request_id]
        return removed


@dataclass
class Watchdog:
    """Distinguishes an engine that has died without an error from a slow one; times are time.monotonic().

    Invariant: any response ends the silence, even the last one to a cancelled request. So a single slow call (a long
    prompt, a long queue) is never taken for a silent engine, nor is an engine without requests.
    """

    since_s: float = 0.0
    num_late: int = 0

    def begin(self, now_s: float, *, is_idle: bool) -> None:
        """Note a new request; a silence can begin with the first one that an idle engine gets."""
        if is_idle and not self.num_late:
            self.since_s = now_s

    def end(self, now_s: float) -> None:
        """Note that a response came."""
        self.since_s, self.num_late = now_s, 0

    def is_lost(self, now_s: float, num_late: int) -> bool:
        """Note `num_late` more calls whose deadline has passed; return whether the engine is lost."""
        self.num_late += num_late
        return bool(num_late) and self.num_late >= SILENT_CALLS and now_s - self.since_s >= SILENT_S
