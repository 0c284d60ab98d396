"""Calls that may never return, made on threads that can be left behind."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from orchestrator.core.errors import EngineLost

Result = TypeVar("Result")

POLL_S = 0.25


class Callers(Generic[Result]):
    """Runs blocking calls on threads of its own, so that one that never returns can be left behind.

    Triton does not answer a call that a process had taken when it was killed (2.51: `execute` has returned, so nothing
    waits for the process any more), and a BLS call can be neither timed out nor cancelled.
    """

    def __init__(self) -> None:
        self._idle: list[_Caller[Result]] = []

    def run(self, call: Callable[[], Result], is_lost: Callable[[], bool], poll_s: float = POLL_S) -> Result:
        """Return what `call` returns or raise what it raises; EngineLost once `is_lost` says that neither will come."""
        try:
            caller = self._idle.pop()
        except IndexError:
            caller = _Caller()
        caller.inbox.put(call)
        while True:
            try:
                outcome = caller.outbox.get(timeout=poll_s)
                break
            except queue.Empty:
                if is_lost():
                    raise EngineLost("the process that was called has gone, or does not answer") from None
        self._idle.append(caller)
        return outcome.result()


class _Caller(Generic[Result]):
    """A thread that makes one call at a time. It is a daemon: a lost call must not keep the process from its end."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[Callable[[], Result]] = queue.SimpleQueue()
        self.outbox: queue.SimpleQueue[Future[Result]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="caller", daemon=True).start()

    def _work(self) -> None:
        while True:
            outcome: Future[Result] = Future()
            call = self.inbox.get()
            try:
                outcome.set_result(call())
            except BaseException as error:
                outcome.set_exception(error)
            self.outbox.put(outcome)
            del call, outcome  # and with them the tensors of request and response
