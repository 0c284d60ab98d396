"""A pool of threads that can be abandoned: a call that hangs holds up neither its caller nor the process."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from enum import Enum
from functools import partial
from typing import Generic, TypeVar

from orchestrator.core.errors import Unavailable

log = logging.getLogger(__name__)

Result = TypeVar("Result")

#: How often a caller checks whether its call is lost.
POLL_S = 0.25
NO_THREAD = "the server can start no further thread; try again in a second"


class CallState(Enum):
    """The state of a call, which only moves down this list."""

    WAITING = "waiting for a thread"
    RUNNING = "running on a thread"
    ABANDONED = "running on a thread, but its result will be dropped"
    DONE = "returned, raised, or never to be made"


class Busy(Exception):
    """A call was not made: no thread was free in time, or too many abandoned calls still run."""


class Late(Exception):
    """A call was abandoned: it took too long, or it can never return. It may still be running."""


class Call(Generic[Result]):
    """One call of a pool.

    future: the call's result or error, or the error with which the call was abandoned; it is settled exactly once.
    is_lost: returns True once the call can never return, because the process that should answer it has died.
    """

    def __init__(self, function: Callable[[], Result], is_lost: Callable[[], bool]) -> None:
        self.state = CallState.WAITING
        self.since_s = time.monotonic()
        self.future: Future[Result] = Future()
        self.is_lost = is_lost
        self.function: Callable[[], Result] | None = function

    @property
    def age_s(self) -> float:
        """Seconds since a thread took the call; until then, since the call was given to the pool."""
        return time.monotonic() - self.since_s


class WorkerPool(Generic[Result]):
    """Runs calls on daemon threads, at most `max_running` at once; an abandoned call does not count among these.

    Threads are started as they are needed. If the system allows no more, calls wait for the existing threads, or are
    refused if there are none; the next call tries to start the missing ones. The thread of an abandoned call ends with
    that call, because another thread has taken its place. While `max_abandoned` abandoned calls still run, no more
    calls are made.

    The threads are daemons because the threads of ThreadPoolExecutor are joined when the process exits: a call that
    hangs would keep the process from exiting.
    max_running, max_abandoned: None = no limit.
    """

    def __init__(self, name: str, max_running: int | None = None, max_abandoned: int | None = None) -> None:
        self._name, self._max_running, self._max_abandoned = name, max_running, max_abandoned
        self._queue: queue.SimpleQueue[Call[Result] | None] = queue.SimpleQueue()
        self._calls: dict[CallState, set[Call[Result]]] = {state: set() for state in CallState}
        self._num_threads = 0  # without those of abandoned calls
        self._refusal = ""
        self._lock = threading.Lock()

    @property
    def num_abandoned(self) -> int:
        """Abandoned calls that still run."""
        return len(self._calls[CallState.ABANDONED])

    @property
    def is_refusing(self) -> bool:
        """True while no call is made, because the pool is closed or too many abandoned calls still run."""
        return bool(self._refusal) or (self._max_abandoned is not None and self.num_abandoned >= self._max_abandoned)

    def start(self, function: Callable[[], Result], is_lost: Callable[[], bool] = lambda: False) -> Call[Result]:
        """Make a call as soon as a thread is free; fail it with Busy or Unavailable if the pool makes no more calls."""
        call = Call(function, is_lost)
        with self._lock:
            refusal = self._take(call)
        if refusal:
            call.future.set_exception(refusal)
        return call

    def _take(self, call: Call[Result]) -> Exception | None:
        """Queue a new call, or return why it is not made. Caller holds the lock."""
        if self.is_refusing:
            call.state = CallState.DONE
            return Unavailable(self._refusal) if self._refusal else Busy()
        self._calls[CallState.WAITING].add(call)
        if not self._start_threads():
            self._move(call, CallState.DONE)
            return Unavailable(NO_THREAD)
        self._queue.put(call)
        return None

    def run(
        self, function: Callable[[], Result], limit_s: float, is_lost: Callable[[], bool] = lambda: False
    ) -> Result:
        """Make a call, wait for it and return its result.

        limit_s: how long to wait for a thread, and then for the result.

        Raises:
            Busy: the call was not made.
            Late: the call was abandoned.
            Exception: whatever the call raised.
        """
        call = self.start(function, is_lost)
        while True:
            try:
                call.future.exception(max(min(limit_s - call.age_s, POLL_S), 0.0))
            except TimeoutError:
                if call.age_s >= limit_s or call.is_lost():
                    self.abandon(call, Busy() if call.state is CallState.WAITING else Late())
            else:
                return call.future.result()

    def abandon(self, call: Call[Result], error: Exception) -> bool:
        """Fail a call with `error` instead of waiting for it; return False if it has ended or was abandoned before.

        A call that still waits for a thread is never made.
        """
        with self._lock:
            if call.state is CallState.WAITING:
                self._move(call, CallState.DONE)
            elif call.state is CallState.RUNNING:
                self._move(call, CallState.ABANDONED)
                self._num_threads -= 1
                self._start_threads()
            else:
                return False
        call.future.set_exception(error)
        return True

    def forget(self, call: Call[Result]) -> None:
        """Stop counting an abandoned call that can never return."""
        with self._lock:
            if call.state is CallState.ABANDONED:
                self._move(call, CallState.DONE)

    def finish(self, limit_s: float) -> bool:
        """Wait until every call that was given to the pool has ended; False if some have not at the limit."""
        with self._lock:
            calls = self._calls[CallState.WAITING] | self._calls[CallState.RUNNING]
        return not wait([call.future for call in calls], limit_s).not_done

    def close(self, why: str, wait_s: float = 0.0) -> None:
        """Make no more calls, wait `wait_s` for the running ones, and fail the others with Unavailable(why)."""
        with self._lock:
            self._refusal = why
            waiting, running = (list(self._calls[state]) for state in (CallState.WAITING, CallState.RUNNING))
            for _ in range(self._num_threads):
                self._queue.put(None)
        for call in waiting:
            self.abandon(call, Unavailable(why))
        wait([call.future for call in running], wait_s)
        for call in running:
            self.abandon(call, Unavailable(why))

    def _move(self, call: Call[Result], state: CallState) -> None:
        """Change a call's state. Caller holds the lock."""
        self._calls[call.state].discard(call)
        call.state = state
        if state is not CallState.DONE:
            self._calls[state].add(call)

    def _start_threads(self) -> bool:
        """Start the threads that the calls lack, as far as allowed; return whether any runs. Caller holds the lock."""
        num_calls = len(self._calls[CallState.WAITING]) + len(self._calls[CallState.RUNNING])
        num_wanted = num_calls if self._max_running is None else min(num_calls, self._max_running)
        try:
            while self._num_threads < num_wanted:
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
                self._num_threads += 1
        except RuntimeError as error:  # "can't start new thread": the limit of the container, or no memory
            log.error("%s: %s; it has %d of %d threads", self._name, error, self._num_threads, num_wanted)
        return self._num_threads > 0

    def _work(self) -> None:
        """Make calls until the pool is closed or a call of this thread is abandoned."""
        while call := self._queue.get():
            if not self._make(call):
                return
            del call  # so that what it holds can be freed

    def _make(self, call: Call[Result]) -> bool:
        """Make a call unless it was abandoned while it waited; return False if it was abandoned while it ran."""
        with self._lock:
            function, call.function = call.function, None
            if call.state is not CallState.WAITING or function is None:
                return True
            call.since_s = time.monotonic()
            self._move(call, CallState.RUNNING)
        try:
            settle = partial(call.future.set_result, function())
        except BaseException as error:
            settle = partial(call.future.set_exception, error)
        with self._lock:
            is_awaited = call in self._calls[CallState.RUNNING]
            self._move(call, CallState.DONE)
        if is_awaited:
            settle()
        return is_awaited
