"""Watches whether a server that calls itself ready answers at all: asks it for a token while it runs no passes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from launcher.probe import Probe

#: Seconds between two polls, and how many in a row must find the server silent before it is killed.
PERIOD_S, NUM_POLLS = 10.0, 3


class Readiness(Protocol):
    """The server that is watched."""

    def why_not_ready(self) -> str | None:
        """Return why the server takes no requests now, None if it takes them."""


class TokenWatch(threading.Thread):
    """Kills a Triton that is ready by all other signs, but leaves requests without any answer; `Watch` restarts it.

    An error is an answer: it shows that the processes work, and its cause would outlive a restart. A server is not
    asked if its target has run passes since the last poll.
    kill: ends Triton. limit_s: how long the server must have been silent, besides the number of polls.
    """

    def __init__(
        self, server: Readiness, probe: Probe, kill: Callable[[], None], say: Callable[[str], None], limit_s: float
    ) -> None:
        super().__init__(name="token watch", daemon=True)
        self._server, self._probe, self._kill, self._say, self._limit_s = server, probe, kill, say, limit_s
        self._num_silent, self._silent_from_s = 0, 0.0
        self._num_passes: float | None = None
        self._ended = threading.Event()

    def end(self) -> None:
        """Stop watching; a poll under way is not waited for, but kills nothing any more."""
        self._ended.set()

    def run(self) -> None:
        """Poll until `end`."""
        while not self._ended.wait(PERIOD_S):
            try:
                self.poll()
            except Exception as error:  # whatever the server sent, the next poll may understand it
                self._say(f"asking the server for a token failed, continuing: {error!r}")

    def poll(self) -> None:
        """Ask for a token if no pass has run since the last poll; kill Triton if that has been in vain for long."""
        began_s = time.monotonic()
        if not self._is_silent():
            self._num_silent = 0
            return
        if not self._num_silent:
            self._silent_from_s = began_s
        self._num_silent, silent_for_s = self._num_silent + 1, time.monotonic() - self._silent_from_s
        if self._num_silent >= NUM_POLLS and silent_for_s >= self._limit_s and not self._ended.is_set():
            self._say(f"Triton is ready, but has answered no request for {silent_for_s:.0f} s; killing it")
            self._kill()
            self._num_silent = 0

    def _is_silent(self) -> bool:
        """Return whether the server was ready during the whole poll and nothing came from it."""
        if self._server.why_not_ready():
            return False
        before, self._num_passes = self._num_passes, self._probe.num_passes()
        if self._num_passes != before:
            return False
        return self._probe.is_silent() and self._server.why_not_ready() is None
