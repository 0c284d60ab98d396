"""When a tritonserver is worn out: each model's process that dies under traffic leaves threads and memory in it.

Triton never ends the requests of a process that has died (docs/figures/soak_under_faults.md), so only replacing
tritonserver frees them, which happens when no request runs, or after a drain if no such moment comes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from orchestrator.core.deployment.drain_state import Drain, Request, finish_requests, wait_until_idle

#: After WORN_DEATHS deaths Triton is replaced as soon as it is idle, after MAX_DEATHS whatever runs.
WORN_DEATHS, MAX_DEATHS = 16, 48
#: This many polls in a row, half a second apart, must find no running request.
IDLE_POLLS = 3
# How long the last of them, from which on new requests are refused, may wait for the running ones.
_LAST_POLL_S = 1.0


class Wear:
    """Counts the deaths of models' processes in one tritonserver, and says when it has to be replaced.

    state: the folder that shows which requests run, and in which the public models are told to refuse others.
    limit_s: how long running requests get to finish. is_stopped: returns whether the server is being stopped.
    say: called with each line for the log.
    """

    def __init__(self, state: Path, limit_s: float, is_stopped: Callable[[], bool], say: Callable[[str], None]) -> None:
        self._drain = Drain(state, Request.REPLACEMENT)
        self._limit_s, self._is_stopped, self._say = limit_s, is_stopped, say
        self._num_deaths = self._num_idle = 0

    def note_death(self) -> None:
        """Count a process that has died or was replaced."""
        self._num_deaths += 1

    def restart(self) -> None:
        """Count anew: another tritonserver has been started."""
        self._num_deaths = self._num_idle = 0

    def why_replace(self) -> str:
        """Poll once more; return in words why Triton is to be replaced now, "" if it is not.

        If the reason is that no request runs, new ones are refused until `accept_requests`.
        """
        if self._num_deaths < WORN_DEATHS or self._is_stopped():
            return ""
        why = f"{self._num_deaths} processes of models have died since Triton was started, which keeps their threads"
        if self._is_idle():
            return f"{why}; no request runs"
        return f"{why}; requests have run all the time since" if self._num_deaths >= MAX_DEATHS else ""

    def finish_requests(self) -> bool:
        """Refuse new requests and wait for the running ones, up to the limit; return False if the server is stopped."""
        finish_requests(self._drain, self._limit_s, self._is_stopped, self._say)
        return not self._is_stopped()

    def accept_requests(self) -> None:
        """Let the public models accept requests again."""
        self._drain.cancel()

    def _is_idle(self) -> bool:
        """Return whether the last polls have found no running request; if so, new ones are now refused."""
        self._num_idle = 0 if self._drain.num_running() else self._num_idle + 1
        if self._num_idle < IDLE_POLLS:
            return False
        is_idle = False
        try:
            self._drain.begin()
            is_idle = wait_until_idle(self._drain.num_running, _LAST_POLL_S, self._is_stopped)
        finally:
            if not is_idle:
                self._num_idle = 0
                self._drain.cancel()
        return is_idle
