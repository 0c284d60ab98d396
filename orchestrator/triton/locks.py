"""Files that processes lock; the kernel frees the locks of a process that ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


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


def unlock(file: int) -> None:
    """Free a file that this process has locked."""
    fcntl.flock(file, fcntl.LOCK_UN)


def is_locked(file: int) -> bool:
    """Return whether another process has locked a file."""
    if try_lock(file):
        unlock(file)
        return False
    return True
