"""Frees native objects on a thread of its own: the automaton of a long context takes a tenth of a second."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import cache
from queue import SimpleQueue

Free = Callable[[int], None]

# Its put may interrupt itself, as a finalizer may that runs in a garbage collection.
_unused: SimpleQueue[tuple[Free, int]] = SimpleQueue()


def freed_with(owner: object, free: Free, handle: int) -> None:
    """Have a native object freed once its owner is gone.

    free: must not hold Python's global lock, and must not need other native objects, which may be freed before.
    """
    _start()
    weakref.finalize(owner, _unused.put, (free, handle))


@cache
def _start() -> None:
    threading.Thread(target=_free, name="freeing", daemon=True).start()


def _free() -> None:
    while True:
        free, handle = _unused.get()
        free(handle)
