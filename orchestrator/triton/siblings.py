"""The other Triton models' processes, and calls to them that would never return: knows Linux, not `pb_utils`."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Generic, TypeVar

from orchestrator.errors import EngineLost

Result = TypeVar("Result")

POLL_S = 0.25
_PROC = Path("/proc")
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


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


def now_s() -> float:
    """Return the time on the clock of `is_gone`: seconds since the machine's start."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


_last_seen: dict[str, Path | None] = {}


def note(model: str) -> None:
    """Look for a model's process, once; only of one that was seen can be said that it is gone."""
    if model not in _last_seen:
        _last_seen[model] = None
        _search(model)


def is_gone(model: str, since_s: float) -> bool:
    """Tell whether the process that a Python model had at `since_s` has ended; its heir knows nothing of its calls."""
    known = _last_seen.get(model)
    process = known if known and _is_stub_of(model, known) else _search(model)
    if process is None:
        return known is not None
    return _started_s(process) > since_s


def _search(model: str) -> Path | None:
    """Go through all processes for a living one of a model, and note it."""
    for process in _PROC.iterdir():
        if process.name.isdigit() and _is_stub_of(model, process):
            _last_seen[model] = process
            return process
    return None


def _is_stub_of(model: str, process: Path) -> bool:
    """A stub's first argument is the path of its model.py: …/<model>/<version>/model.py; a dead one has none."""
    try:
        arguments = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    path = Path(os.fsdecode(arguments[1])) if len(arguments) > 1 else Path()
    return path.name == "model.py" and path.parts[-3:-2] == (model,) and _stat(process)[1] == str(os.getppid())


def _started_s(process: Path) -> float:
    return float(_stat(process)[19]) * _TICK_S


def _stat(process: Path) -> list[str]:
    """Return the fields of a process behind its name: state, parent, …; of one that is gone, such as never fit."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", *["inf"] * 49]
