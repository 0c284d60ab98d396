"""Clients on threads of their own, which call until they are told to stop."""

from __future__ import annotations

import threading
import time
from typing import ClassVar


class ClientThreads:
    """`number` clients, each of which runs `_run` until `_ended` is set.

    faults: gets a line for each client that does not end in time. limit_s: what the last calls may take.
    what: names a call in that line.
    """

    number: int
    faults: list[str]
    limit_s: ClassVar[float]
    what: ClassVar[str]

    def __post_init__(self) -> None:
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(self.number)]

    def start(self) -> None:
        """Start the clients."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let every client end its call, and wait for them."""
        self._ended.set()
        end_s = time.monotonic() + self.limit_s
        for thread in self._threads:
            thread.join(max(end_s - time.monotonic(), 0.0))
            if thread.is_alive():
                self.faults.append(f"{self.what} did not end within {self.limit_s:g} s")

    def _run(self, number: int) -> None:
        """Call again and again; number: of the client."""
        raise NotImplementedError
