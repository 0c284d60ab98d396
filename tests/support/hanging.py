"""Calls that hang until they are released, and waiting for what other threads do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

WAIT_S = 20.0


def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds; fail after WAIT_S."""
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, "waited too long"
        time.sleep(0.002)


class Hang:
    """A call that does not return until `let_go` is set; `begun` and `ended` are set on the way."""

    def __init__(self, said: Any = "late") -> None:
        self.begun, self.let_go, self.ended = threading.Event(), threading.Event(), threading.Event()
        self._said = said

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Hang, then return `said`."""
        self.begun.set()
        self.let_go.wait(WAIT_S)
        self.ended.set()
        return self._said
