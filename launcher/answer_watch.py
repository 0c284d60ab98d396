"""Watches whether a server that calls itself ready answers at all, over gRPC and with a token over HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from launcher.grpc_frontend import GrpcFrontend
from launcher.probe import Probe

#: Seconds between two polls, and how many in a row must find the server silent before it is killed.
PERIOD_S, NUM_POLLS = 10.0, 3


class Readiness(Protocol):
    """The server that is watched."""

    def why_not_ready(self) -> str | None:
        """Return why the server takes no requests now, None if it takes them."""


class AnswerWatch(threading.Thread):
    """Kills a Triton that is ready by all other signs, but leaves requests without any answer; `Watch` restarts it.

    An error is an answer: it shows that the processes work, and its cause would outlive a restart. A server is not
    asked for a token if its target has run passes since the last poll; its gRPC frontend, which answers without the
    models, is always asked.
    kill: ends Triton. limit_s: how long the server must have been silent, besides the number of polls.
    """

    def __init__(
        self,
        server: Readiness,
        probe: Probe,
        frontend: GrpcFrontend,
        kill: Callable[[], None],
        say: Callable[[str], None],
        limit_s: float,
    ) -> None:
        super().__init__(name="answer watch", daemon=True)
        self._server, self._probe, self._frontend = server, probe, frontend
        self._kill, self._say, self._limit_s = kill, say, limit_s
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
                self._say(f"asking the server for an answer failed, continuing: {error!r}")

    def poll(self) -> None:
        """Ask the server; kill Triton if that has been in vain for long."""
        began_s = time.monotonic()
        if not (unanswered := self._ask()):
            self._num_silent = 0
            return
        if not self._num_silent:
            self._silent_from_s = began_s
        self._num_silent, silent_for_s = self._num_silent + 1, time.monotonic() - self._silent_from_s
        if self._num_silent >= NUM_POLLS and silent_for_s >= self._limit_s and not self._ended.is_set():
            self._say(
                f"Triton is ready, but has left requests without any answer for {silent_for_s:.0f} s, "
                f"the last one {unanswered}; killing it"
            )
            self._kill()
            self._num_silent = 0

    def _ask(self) -> str | None:
        """Return what got no answer from a server that was ready during the whole poll, None if all did."""
        if self._server.why_not_ready():
            return None
        unanswered = self._ask_frontend() or self._ask_for_token()
        return None if self._server.why_not_ready() else unanswered

    def _ask_frontend(self) -> str | None:
        method = self._frontend.silent_method()
        return method and f"for {method} over gRPC"

    def _ask_for_token(self) -> str | None:
        before, self._num_passes = self._num_passes, self._probe.num_passes()
        return "for a token over HTTP" if self._num_passes == before and self._probe.is_silent() else None
