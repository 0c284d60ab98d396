"""Files that processes lock; the kernel frees the locks of a process that ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from collections.abc import Iterator
from pathlib import Path


def closed_with(owner: object, files: list[int]) -> None:
    """Have descriptors closed once their owner is gone; files: a list to which it may add others."""
    weakref.finalize(owner, _close, files)


def _close(files: list[int]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            os.close(file)


def open_lock(file: Path) -> int:
    """Open a file to lock it, and make it if there is none; return its descriptor."""
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def try_lock(file: int) -> bool:
    """Lock a file; return False if another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def holding(file: int) -> Iterator[None]:
    """Hold the lock of a file, once no other process does."""
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        unlock(file)


def unlock(file: int) -> None:
    """Free a file that this process has locked."""
    fcntl.flock(file, fcntl.LOCK_UN)


def is_locked(file: int) -> bool:
    """Return whether another process has locked a file."""
    if try_lock(file):
        unlock(file)
        return False
    return True
