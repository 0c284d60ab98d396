"""The requests that an executor has, and whose answers they owe."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol

from orchestrator.core.errors import first_line
from runtime.engine.calls import Answer, EngineCall, Request

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Stream:
    """A request that the executor answers pass by pass: what comes behind one call's answer is for the next call.

    key: what a call must ask for to go on with it. room: tokens that may still come. num_passes: of those that calls
    have been told.
    """

    key: object
    room: int
    num_passes: int = 0


class EngineRequest(NamedTuple):
    """A call in the executor's words.

    ids: the committed context, with a stream's tokens as calls are told them. length: most tokens of the answer.
    drafts: the tokens it shall verify. stream: None = there is one answer, the final one.
    """

    request: Any
    ids: list[int]
    length: int
    drafts: Sequence[int] = ()
    stream: Stream | None = None


class Adapter(Protocol[Request]):
    """What turns calls into the executor's requests, and its results into answers."""

    def ask(self, job: EngineCall[Request], ids: list[int]) -> EngineRequest | Answer:
        """Return the executor's request, or an answer that needs none; raises ServingError to refuse the call."""

    def answer(self, job: EngineCall[Request], asked: EngineRequest, results: list[Any]) -> Answer:
        """Return what the results mean, one unless the call streams; raises EngineError when they mean nothing."""


class Unreadable(NamedTuple):
    """Stands for a response that could not be read: the error of one request, not of all."""

    error_msg: str

    def has_error(self) -> bool:
        """Return True."""
        return True


@dataclass(eq=False)
class InFlight(Generic[Request]):
    """A request that the executor has. job: who waits; None = nobody now. responses: those that nobody was told."""

    request_id: int
    sequence_id: int
    asked: EngineRequest
    job: EngineCall[Request] | None
    responses: list[Any] = field(default_factory=list)
    is_final: bool = False

    def serves(self, asked: EngineRequest) -> bool:
        """True when a call that asks for this can be answered from here: the same stream, where it stands."""
        mine, other = self.asked.stream, asked.stream
        is_same = mine is not None and other is not None and mine.key == other.key and self.asked.ids == asked.ids
        return is_same and bool(self.responses or not self.is_final)

    def take(self, response: Any) -> None:
        """Note a response; one that is not final and brings no token, or none of a stream, says nothing."""
        try:
            self.is_final = response.has_error() or response.result.is_final
            says = self.is_final or (self.asked.stream and response.result.output_token_ids[0])
        except Exception as error:
            log.exception("a response of request %d cannot be read", self.request_id)
            self.is_final = says = True
            response = Unreadable(f"its response cannot be read: {first_line(error)}")
        if says:
            self.responses.append(response)

    def landed(self) -> Completed[Request] | None:
        """Return what the call that waits is told, if there is both; the next may come then."""
        if self.job is None or not self.responses:
            return None
        landing = Completed(self.job, self.asked, self.responses)
        self.job, self.responses = None, []
        return landing


class Completed(NamedTuple, Generic[Request]):
    """A call and the responses that answer it."""

    job: EngineCall[Request]
    asked: EngineRequest
    responses: list[Any]


class InFlightTable(Generic[Request]):
    """All of them, by the executor's ids; whoever uses it holds the line's lock."""

    def __init__(self) -> None:
        self._flights: dict[int, InFlight[Request]] = {}

    def __iter__(self) -> Iterator[InFlight[Request]]:
        """Go through those of this moment."""
        return iter(list(self._flights.values()))

    @property
    def num_flying(self) -> int:
        """How many the executor still works on."""
        return sum(not flight.is_final for flight in self)

    @property
    def busy(self) -> set[int]:
        """The sequences of which a call waits."""
        return {flight.sequence_id for flight in self if flight.job}

    def of(self, sequence_id: int) -> InFlight[Request] | None:
        """Return a sequence's flight."""
        return next((flight for flight in self if flight.sequence_id == sequence_id), None)

    def begin(self, flight: InFlight[Request]) -> None:
        """Take in a request that has been handed over."""
        self._flights[flight.request_id] = flight

    def land(self, responses: list[Any]) -> list[Completed[Request]]:
        """Take in responses, and return the calls that they answer; those of requests that were ended are nobody's."""
        for response in responses:
            if flight := self._flights.get(response.request_id):
                flight.take(response)
        landings = [landing for flight in self if (landing := flight.landed())]
        self._forget(lambda flight: flight.is_final and not flight.responses)
        return landings

    def end(self, chosen: Callable[[InFlight[Request]], bool]) -> list[InFlight[Request]]:
        """Forget the chosen ones and return them."""
        return self._forget(chosen)

    def _forget(self, chosen: Callable[[InFlight[Request]], bool]) -> list[InFlight[Request]]:
        ended = [flight for flight in self if chosen(flight)]
        for flight in ended:
            del self._flights[flight.request_id]
        return ended
