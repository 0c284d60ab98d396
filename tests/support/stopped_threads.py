"""Single threads of a process that are stopped while its others run on, which ptrace can do and no signal."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_WALL = 0x40000000
_SWITCHES = "\nvoluntary_ctxt_switches:"


def woken_threads(pid: int, work: Callable[[], object]) -> list[int]:
    """Return the ids of a process's threads, those first that were woken most often while `work` ran."""
    before = _wakes(pid)
    work()
    woken = {thread: count - before.get(thread, 0) for thread, count in _wakes(pid).items()}
    return sorted(woken, key=woken.__getitem__, reverse=True)


def _wakes(pid: int) -> dict[int, int]:
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            found[int(task.name)] = int((task / "status").read_text().partition(_SWITCHES)[2].split()[0])
    return found


@contextlib.contextmanager
def stopped(threads: Collection[int]) -> Iterator[None]:
    """Keep these threads stopped; they may be killed meanwhile. Skips the test where ptrace is not permitted."""
    for thread in threads:
        _ptrace(_SEIZE, thread)
        _ptrace(_INTERRUPT, thread)
        os.waitpid(thread, _WALL)
        # Only their tracer can reap them, and their process does not end before that.
        threading.Thread(target=_reap, args=(thread,), daemon=True).start()
    try:
        yield
    finally:
        for thread in threads:
            with contextlib.suppress(ProcessLookupError):
                _ptrace(_DETACH, thread)


def _reap(thread: int) -> None:
    with contextlib.suppress(ChildProcessError):  # it was released instead
        os.waitpid(thread, _WALL)


def _ptrace(request: int, thread: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(request, thread, None, None) == -1:
        number = ctypes.get_errno()
        error = OSError(number, os.strerror(number))
        if isinstance(error, PermissionError):
            pytest.skip(f"a test may not stop a thread of another process here: ptrace: {error.strerror}")
        raise error
