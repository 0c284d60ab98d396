"""Calls that may hang, on daemon threads: none keeps a process from its end, and each is answered once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from orchestrator.core.errors import Unavailable

Result = TypeVar("Result")


class Workers(Generic[Result]):
    """Runs calls on threads of its own, started as they are needed, `most` at the most; what is more waits its turn.

    The threads are daemons: ThreadPoolExecutor's are joined when the process exits, so that a hung call would keep it
    from exiting.
    Invariant: every future is settled exactly once, by its call or by `close`; at once when it is closed already.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name, self._most = name, most
        self._calls: queue.SimpleQueue[tuple[Future[Result], Callable[[], Result]] | None] = queue.SimpleQueue()
        self._waiting: set[Future[Result]] = set()
        self._running: set[Future[Result]] = set()
        self._num_threads = 0
        self._refusal = ""
        self._lock = threading.Lock()

    def start(self, function: Callable[[], Result]) -> Future[Result]:
        """Let a thread make the call, as soon as one is free."""
        future: Future[Result] = Future()
        with self._lock:
            if not self._refusal:
                self._waiting.add(future)
                self._calls.put((future, function))
                self._grow()
                return future
        future.set_exception(Unavailable(self._refusal))
        return future

    def drop(self, future: Future[Result]) -> bool:
        """Take a call back; False when it has begun. A call that was taken back is never made, nor settled."""
        with self._lock:
            dropped = future in self._waiting
            self._waiting.discard(future)
        return dropped

    def close(self, why: str, wait_s: float = 0.0) -> None:
        """Begin no further call, and wait so long for those that run; raise Unavailable(why) to who waits for the rest.

        A call that goes on all the same is left behind, and what comes of it dropped.
        """
        with self._lock:
            self._refusal = why
            waiting, self._waiting = self._waiting, set()
            running = set(self._running)
            for _ in range(self._num_threads):
                self._calls.put(None)
        _refuse(waiting, why)
        wait(running, wait_s)
        with self._lock:
            left, self._running = self._running, set()
        _refuse(left, why)

    def _grow(self) -> None:
        """Start a thread when there is none for one of the calls."""
        if self._num_threads < min(len(self._waiting) + len(self._running), self._most):
            self._num_threads += 1
            threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _work(self) -> None:
        while call := self._calls.get():
            self._make(*call)
            del call  # and with it what the call holds

    def _make(self, future: Future[Result], function: Callable[[], Result]) -> None:
        with self._lock:
            if future not in self._waiting:
                return
            self._waiting.remove(future)
            self._running.add(future)
        try:
            settle = partial(future.set_result, function())
        except BaseException as error:
            settle = partial(future.set_exception, error)
        with self._lock:
            is_awaited = future in self._running
            self._running.discard(future)
        if is_awaited:
            settle()


def _refuse(futures: set[Future[Result]], why: str) -> None:
    for future in futures:
        future.set_exception(Unavailable(why))


class Busy(Exception):
    """A call was not made: no worker is free."""


class Late(Exception):
    """A call was made, and goes on."""


@dataclass
class Limited(Generic[Result]):
    """Makes calls that cannot be stopped, `most` at once, and waits for each at most limit_s from its beginning.

    A late call goes on, and its result is dropped. While `max_late` of them do, no further call is made; the others
    always find `most` threads.
    """

    name: str
    most: int
    max_late: int
    limit_s: float
    _num_late: int = 0

    def __post_init__(self) -> None:
        self._workers: Workers[Result] = Workers(self.name, self.most + self.max_late)
        self._lock = threading.Lock()

    def call(self, function: Callable[[], Result]) -> Result:
        """Return what the call returns, or raise what it raises; Late after limit_s, Busy when it cannot begin."""
        if self._num_late >= self.max_late:
            raise Busy
        begun = threading.Event()
        future = self._workers.start(lambda: _announced(begun, function))
        if not begun.wait(self.limit_s) and self._workers.drop(future):
            raise Busy
        try:
            future.exception(self.limit_s)
        except TimeoutError:
            self._note(1)
            future.add_done_callback(lambda _: self._note(-1))
            raise Late from None
        return future.result()

    def _note(self, change: int) -> None:
        with self._lock:
            self._num_late += change


def _announced(begun: threading.Event, function: Callable[[], Result]) -> Result:
    begun.set()
    return function()
