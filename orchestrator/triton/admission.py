"""Which requests run and which wait: `max_running` sequences run, each request on its own thread; others wait."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from orchestrator.triton.places import POLL_S, Places, SharedPlaces

log = logging.getLogger(__name__)


class RequestHandler(Protocol):
    """A request that waits or runs.

    deadline_s: when it is due, by time.monotonic(). num_places: how many of the `max_running` places it takes.
    """

    deadline_s: float
    num_places: int

    def run(self) -> None:
        """Serve the request to its end; must not raise."""

    def is_cancelled(self) -> bool:
        """True when the client has gone."""

    def give_up(self, reason: str) -> None:
        """Answer a request that was never started; reason: cancelled, deadline or shutdown."""


class Admission:
    """Starts requests in the order of their arrival.

    folder: shares the places with the other processes of the deployment that are given the same folder.
    Invariant: places taken ≤ max_running and waiting ≤ max_waiting; every request is run or given up exactly once, by
    its deadline (plus the poll) if it only ever waits. No request may need more places than there are.
    """

    def __init__(self, max_running: int, max_waiting: int, folder: Path | None = None) -> None:
        self.max_running, self.num_running = max_running, 0
        self._max_waiting = max_waiting
        self._places = SharedPlaces(folder, max_running) if folder else Places(max_running)
        self._waiting: deque[RequestHandler] = deque()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._poll, name="admission", daemon=True).start()

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def admit(self, request: RequestHandler) -> bool:
        """Run the request now or later; False when the queue is full."""
        with self._lock:
            if self._closed.is_set():
                return False
            self._waiting.append(request)
            started = self._start()
            if len(self._waiting) > self._max_waiting:
                self._waiting.pop()  # the new request
                if not self._waiting:
                    self._places.stop_waiting()
                return False
        self._run(started)
        return True

    def close(self, timeout_s: float) -> bool:
        """Give up the waiting requests, wait for the running ones; True when all have ended in time."""
        self._closed.set()
        self._give_up(lambda request: "shutdown")
        limit_s = time.monotonic() + timeout_s
        while self.num_running and time.monotonic() < limit_s:
            time.sleep(POLL_S)
        return not self.num_running

    def _start(self) -> list[RequestHandler]:
        """Take the next requests out of the queue, in their order, as many as there are places for."""
        started = []
        while self._waiting and self._places.take(self._waiting[0].num_places):
            started.append(self._waiting.popleft())
            self.num_running += started[-1].num_places
        if not self._waiting:
            self._places.stop_waiting()
        return started

    def _run(self, requests: list[RequestHandler]) -> None:
        for request in requests:
            threading.Thread(target=self._work, args=(request,), name="request", daemon=True).start()

    def _work(self, request: RequestHandler) -> None:
        """Run a request; then run, on the same thread, the first request for which its end has made room."""
        following: RequestHandler | None = request
        while following:
            _guarded(following.run)
            started = self._ended(following)
            following = started[0] if started else None
            self._run(started[1:])

    def _ended(self, request: RequestHandler) -> list[RequestHandler]:
        with self._lock:
            self.num_running -= request.num_places
            self._places.give_back(request.num_places)
            return self._start()

    def _poll(self) -> None:
        """Give up requests that need not wait any longer, and start those for which others have made room."""
        while not self._closed.wait(POLL_S):
            if self._waiting:
                self._give_up(_reason_to_give_up)

    def _give_up(self, reason_of: Callable[[RequestHandler], str]) -> None:
        with self._lock:
            reasons = [(request, reason_of(request)) for request in self._waiting]
            self._waiting = deque(request for request, reason in reasons if not reason)
            started = self._start()  # requests that were behind one that needed more places
        self._run(started)
        for request, reason in reasons:
            if reason:
                _guarded(partial(request.give_up, reason))


def _guarded(call: Callable[[], bool | None]) -> bool:
    """Return a request's answer, False if it raises: a request that fails must free its place and not end the poll."""
    try:
        return bool(call())
    except Exception:
        log.exception("a request's response could not be sent")
        return False


def _reason_to_give_up(request: RequestHandler) -> str:
    """Return why a waiting request need not wait any longer, or an empty string."""
    if _guarded(request.is_cancelled):
        return "cancelled"
    return "deadline" if time.monotonic() >= request.deadline_s else ""
