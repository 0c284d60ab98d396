"""The drain of a deployment: running requests end, new ones are refused; the launcher decides, the models obey.

It uses the folder that all processes of a deployment share: a file there asks for the drain, and the slots
(`orchestrator/core/deployment/slots.py`) show how many sequences still run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

from orchestrator.core.deployment.slots import num_running

_POLL_S = 0.1
# A slot may be empty for a moment: between two requests of one process, and for up to 50 ms between two processes.
_NUM_IDLE_POLLS = 3


class DrainAsker(StrEnum):
    """The file that asks for a drain; each of those who may ask has its own, so that none ends another's drain."""

    OPERATOR = "drain"
    RESTART = "drain-for-restart"


class Drain:
    """The drain of the deployment whose slots are in `folder`. request: who asks for it, or ends it, here."""

    def __init__(self, folder: Path, request: DrainAsker = DrainAsker.OPERATOR) -> None:
        self._folder, self._file = folder, folder / request

    @property
    def is_requested(self) -> bool:
        """True while anybody asks for the drain."""
        return any((self._folder / request).exists() for request in DrainAsker)

    def begin(self) -> None:
        """Make the public models refuse new requests; those already accepted run to their end."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file.touch()

    def cancel(self) -> None:
        """Let the public models accept requests again, unless somebody else asks for a drain."""
        self._file.unlink(missing_ok=True)

    def num_running(self) -> int:
        """Return how many sequences have a slot now."""
        return num_running(self._folder)


def finish_requests(drain: Drain, limit_s: float, is_cut_short: Callable[[], bool], say: Callable[[str], None]) -> bool:
    """Begin a drain and wait for the running requests; return False if some still run at the limit.

    say: called with the lines that tell of it.
    """
    drain.begin()
    if number := drain.num_running():
        say(f"draining: {number} sequences run, stopping in {limit_s:g} s at the latest")
    is_idle = wait_until_idle(drain.num_running, limit_s, is_cut_short)
    if not is_idle:
        say("stopping: requests still run")
    return is_idle


def wait_until_idle(count: Callable[[], int], limit_s: float, is_cut_short: Callable[[], bool]) -> bool:
    """Wait until no sequence runs; return False if `limit_s` passes or the wait is cut short before that."""
    end_s = time.monotonic() + limit_s
    idle_polls = 0
    while idle_polls < _NUM_IDLE_POLLS:
        idle_polls = 0 if count() else idle_polls + 1
        if is_cut_short() or time.monotonic() > end_s:
            return False
        time.sleep(_POLL_S)
    return True
