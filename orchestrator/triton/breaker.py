"""A bounded, breakable line to something that may hang: waited for only so long, left alone while it stays away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from orchestrator.core.worker_pool import Workers

Result = TypeVar("Result")


@dataclass
class DraftCounts:
    """What became of the calls of one drafter."""

    num_calls: int = 0
    num_late: int = 0
    num_failed: int = 0
    num_skipped: int = 0


@dataclass
class Backoff:
    """A pause after each failure, twice as long as the one before until something succeeds; all in seconds."""

    first_s: float
    longest_s: float
    _pause_s: float = 0.0
    _until_s: float = 0.0

    @property
    def is_on(self) -> bool:
        """True during a pause."""
        return time.monotonic() < self._until_s

    def note(self, succeeded: bool) -> None:
        """Note an outcome."""
        self._pause_s = 0.0 if succeeded else min(max(2 * self._pause_s, self.first_s), self.longest_s)
        self._until_s = time.monotonic() + self._pause_s


@dataclass
class Breaker(Generic[Result]):
    """Runs calls on its own workers and waits for each at most timeout_s.

    A call that cannot be cancelled goes on after its time-out, and its result is dropped. While
    `max_late` calls are late, or for `cool_down_s` after a failure, no further call is made: the
    breaker is open.
    """

    name: str
    max_workers: int
    timeout_s: float
    max_late: int = 2
    cool_down_s: float = 1.0
    counts: DraftCounts = field(default_factory=DraftCounts)
    _late: int = 0
    _closed_again_s: float = 0.0
    _is_shut: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._workers: Workers[Result] = Workers(f"drafter-{self.name}", self.max_workers + self.max_late)

    @property
    def is_open(self) -> bool:
        """True while calls are not made."""
        return self._is_shut or self._late >= self.max_late or time.monotonic() < self._closed_again_s

    def start(self, function: Callable[[], Result]) -> Future[Result] | None:
        """Begin a call on a worker, or return None while the breaker is open."""
        with self._lock:
            if self.is_open:
                self.counts.num_skipped += 1
                return None
            self.counts.num_calls += 1
        return self._workers.start(function)

    def wait(self, future: Future[Result]) -> Result | None:
        """Return the result of a call, or None when it fails or is late."""
        try:
            error = future.exception(self.timeout_s)
        except TimeoutError:
            self._note_late(future)
            return None
        if error is None:
            return future.result()
        self._note_failure()  # a drafter's failure is never the request's
        return None

    def close(self) -> None:
        """Make no further call; a hung one is left behind."""
        self._is_shut = True
        self._workers.close(f"no more calls of the drafter {self.name}")

    def _note_late(self, future: Future[Result]) -> None:
        with self._lock:
            self._late += 1
            self.counts.num_late += 1
        future.add_done_callback(self._note_return)

    def _note_return(self, _: Future[Result]) -> None:
        with self._lock:
            self._late -= 1

    def _note_failure(self) -> None:
        with self._lock:
            self.counts.num_failed += 1
            self._closed_again_s = time.monotonic() + self.cool_down_s
