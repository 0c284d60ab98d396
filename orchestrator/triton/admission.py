"""Who may run: max_running sequences in all, each request on a thread of its own; max_waiting requests may wait."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

POLL_S = 0.05

log = logging.getLogger(__name__)


class RequestHandler(Protocol):
    """A request that waits or runs. num_places: how many of max_running it takes."""

    deadline_s: float
    num_places: int

    def run(self) -> None:
        """Serve the request to its end; must not raise."""

    def is_cancelled(self) -> bool:
        """True when the client has gone."""

    def give_up(self, reason: str) -> None:
        """Answer a request that was never started; reason: cancelled, deadline or shutdown."""


@dataclass
class Admission:
    """Starts tickets in the order of their arrival.

    Invariant: places taken ≤ max_running, waiting ≤ max_waiting; every ticket is run or given up, exactly once,
    by its deadline (plus the poll) if it only ever waits. None may ask for more places than there are.
    """

    max_running: int
    max_waiting: int
    num_running: int = 0
    _waiting: deque[RequestHandler] = field(default_factory=deque)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._reaper = threading.Thread(target=self._reap, name="admission", daemon=True)
        self._reaper.start()

    @property
    def num_waiting(self) -> int:
        """Tickets in the queue."""
        return len(self._waiting)

    def admit(self, ticket: RequestHandler) -> bool:
        """Run the ticket now or later; False when the queue is full."""
        with self._lock:
            if self._closed.is_set():
                return False
            self._waiting.append(ticket)
            started = self._start()
            if len(self._waiting) > self.max_waiting:
                self._waiting.pop()  # the ticket: whoever waited before it still does
                return False
        self._run(started)
        return True

    def close(self, timeout_s: float) -> bool:
        """Give up the waiting tickets, wait for the running ones; True when all have ended in time."""
        self._closed.set()
        self._give_up(lambda ticket: "shutdown")
        limit_s = time.monotonic() + timeout_s
        while self.num_running and time.monotonic() < limit_s:
            time.sleep(POLL_S)
        return not self.num_running

    def _start(self) -> list[RequestHandler]:
        """Take the next tickets out of the queue, as many as there are places for, in their order."""
        started = []
        while self._waiting and self.num_running + self._waiting[0].num_places <= self.max_running:
            started.append(self._waiting.popleft())
            self.num_running += started[-1].num_places
        return started

    def _run(self, tickets: list[RequestHandler]) -> None:
        for ticket in tickets:
            threading.Thread(target=self._work, args=(ticket,), name="request", daemon=True).start()

    def _work(self, ticket: RequestHandler) -> None:
        """Run a ticket; then the thread goes on with the first of those whose turn has come."""
        following: RequestHandler | None = ticket
        while following:
            _survive(following.run)
            started = self._ended(following)
            following = started[0] if started else None
            self._run(started[1:])

    def _ended(self, ticket: RequestHandler) -> list[RequestHandler]:
        with self._lock:
            self.num_running -= ticket.num_places
            return self._start()

    def _reap(self) -> None:
        while not self._closed.wait(POLL_S):
            if self._waiting:
                self._give_up(_why_not)

    def _give_up(self, why: Callable[[RequestHandler], str]) -> None:
        with self._lock:
            tickets = [(ticket, why(ticket)) for ticket in self._waiting]
            self._waiting = deque(ticket for ticket, reason in tickets if not reason)
            started = self._start()  # whoever stood behind one that wanted more places
        self._run(started)
        for ticket, reason in tickets:
            if reason:
                _survive(partial(ticket.give_up, reason))


def _survive(call: Callable[[], bool | None]) -> bool:
    """Return what a ticket says, False when it fails: no ticket may take a place, or the reaper, with it."""
    try:
        return bool(call())
    except Exception:
        log.exception("a request's response could not be sent")
        return False


def _why_not(ticket: RequestHandler) -> str:
    """Return why a waiting ticket need not wait any longer, or ""."""
    if _survive(ticket.is_cancelled):
        return "cancelled"
    return "deadline" if time.monotonic() >= ticket.deadline_s else ""
