"""A circuit breaker for the calls to one drafter: it waits briefly, and stops calling a drafter that does not answer.

It decides which calls are made; a WorkerPool makes them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from orchestrator.core.types import DraftCounts
from orchestrator.core.worker_pool import Call, CallState, Late, WorkerPool

Result = TypeVar("Result")

#: After this time a late call no longer keeps the breaker open: the drafter is tried again.
HUNG_S = 30.0
#: While this many late calls still run, the drafter is not tried again, unless its process has died.
MAX_ABANDONED = 16


@dataclass
class Breaker(Generic[Result]):
    """Makes calls and waits at most `timeout_s` for each; a late call is abandoned.

    The breaker is open, and no call is made, for `cool_down_s` after a failure and while `max_late` late calls still
    run. A late call stops counting after HUNG_S, and as soon as the process that should answer it has died.
    """

    name: str
    max_running: int
    timeout_s: float
    max_late: int = 2
    cool_down_s: float = 1.0
    counts: DraftCounts = field(default_factory=DraftCounts)
    _calls: list[Call[Result]] = field(default_factory=list)
    _closed_again_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._pool: WorkerPool[Result] = WorkerPool(f"drafter-{self.name}", self.max_running, MAX_ABANDONED)

    @property
    def is_open(self) -> bool:
        """True while no call is made."""
        with self._lock:
            return self._is_open()

    def start(self, function: Callable[[], Result], is_lost: Callable[[], bool] = lambda: False) -> Call[Result] | None:
        """Begin a call, or return None while the breaker is open; is_lost: as in WorkerPool."""
        with self._lock:
            if self._is_open():
                self.counts.num_skipped += 1
                return None
            self.counts.num_calls += 1
            call = self._pool.start(function, is_lost)
            self._calls.append(call)
            return call

    def wait(self, call: Call[Result]) -> Result | None:
        """Return the result of a call, or None if it fails or is late: a drafter's failure is never the request's."""
        try:
            error = call.future.exception(self.timeout_s)
        except TimeoutError:
            error = Late()
        with self._lock:
            if isinstance(error, Late):
                self._abandon(call)
            elif error:
                self.counts.num_failed += 1
                self._cool_down()
        return None if error else call.future.result()

    def is_running(self, call: Call[Result]) -> bool:
        """Return whether a call may still return, which one never does whose process has died."""
        with self._lock:
            self._abandon_late_calls()
            return call.state is not CallState.DONE

    def close(self) -> None:
        """Make no more calls, and abandon those that are running."""
        self._pool.close(f"no more calls of the drafter {self.name}")

    def _is_open(self) -> bool:
        self._abandon_late_calls()
        num_late = sum(call.state is CallState.ABANDONED and call.age_s < HUNG_S for call in self._calls)
        return num_late >= self.max_late or self._pool.is_refusing or time.monotonic() < self._closed_again_s

    def _abandon_late_calls(self) -> None:
        """Abandon the late calls that nobody waits for, and forget those whose process has died."""
        for call in self._calls:
            if call.age_s > 2 * self.timeout_s:
                self._abandon(call)
            if call.state is CallState.ABANDONED and call.is_lost():
                self._pool.forget(call)
                self._cool_down()
        self._calls = [call for call in self._calls if call.state is not CallState.DONE]

    def _abandon(self, call: Call[Result]) -> None:
        if self._pool.abandon(call, Late()):
            self.counts.num_late += 1

    def _cool_down(self) -> None:
        self._closed_again_s = time.monotonic() + self.cool_down_s
