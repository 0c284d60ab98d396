"""The interface between a client and its engine: requests go out one by one, responses come back in any order."""

from __future__ import annotations

import logging
import queue
from typing import Any, NamedTuple, Protocol

from orchestrator.core.errors import EngineError, ServingError, first_line

log = logging.getLogger(__name__)


class Response(NamedTuple):
    """One response of the engine to a request.

    result: in the transport's own type; the adapter reads it. is_final: no more responses follow. error: why this
    request has failed, which says nothing about other requests.
    """

    request_id: int
    result: Any = None
    is_final: bool = True
    has_tokens: bool = True
    error: ServingError | None = None


class Transport(Protocol):
    """Carries requests to one engine and responses back; one thread calls `responses`, any thread the other methods."""

    #: Whether the engine lives in this process; if so, an engine that has gone silent ends the process.
    owns_engine: bool

    def enqueue(self, payload: Any, deadline_s: float) -> int:
        """Hand a request over and return its id; deadline_s: when its answer is due, by time.monotonic()."""

    def takes_requests(self) -> bool:
        """Return False when the engine has stopped and will take no more requests."""

    def responses(self, timeout_s: float) -> list[Response]:
        """Return the responses that have come, waiting at most `timeout_s` for the first; raises when none can come."""

    def cancel(self, request_id: int) -> None:
        """End a request that nobody waits for any more."""

    def shut_down(self) -> None:
        """End every request, and the engine if it lives in this process."""


class ResponseQueue:
    """Responses that other threads put and a client's thread takes."""

    def __init__(self) -> None:
        self._responses: queue.SimpleQueue[Response] = queue.SimpleQueue()
        self.put = self._responses.put

    def take(self, timeout_s: float) -> list[Response]:
        """Return all that have come, waiting at most `timeout_s` for the first."""
        taken: list[Response] = []
        try:
            taken.append(self._responses.get(timeout=max(timeout_s, 1e-4)))
            while True:
                taken.append(self._responses.get_nowait())
        except queue.Empty:
            return taken


def failed_response(request_id: int, reason: object) -> Response:
    """Return the response to a request on which the library has failed."""
    return Response(request_id, error=EngineError(f"TensorRT-LLM failed on this request: {first_line(reason)}"))


def wrap_error(what: str, error: Exception) -> ServingError:
    """Return a ServingError unchanged, and any other error as an EngineError whose text begins with `what`."""
    if isinstance(error, ServingError):
        return error
    log.error("%s", what, exc_info=error)
    return EngineError(f"{what}: {first_line(error)}")
