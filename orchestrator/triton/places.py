"""Places for running sequences: those of one process, or those that the processes of a deployment share."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from orchestrator.deployment.drain import MUTEX, PLACE_PREFIX

#: How often a process that waits looks whether another process has freed a place.
POLL_S = 0.05


class Places:
    """The places of one process; one thread at a time may call."""

    def __init__(self, count: int) -> None:
        self._num_free = count

    def take(self, number: int) -> bool:
        """Take so many places; False if there are too few, in which case none is taken."""
        if number > self._num_free:
            return False
        self._num_free -= number
        return True

    def give_back(self, number: int) -> None:
        """Free so many places."""
        self._num_free += number

    def stop_waiting(self) -> None:
        """Let other processes take the next places: nothing waits here any more."""


class SharedPlaces(Places):
    """The places of a deployment, shared by all processes that are given the same folder.

    A place is a file; it is taken while a process holds the lock on it. The kernel frees the locks of a process that
    dies. A process that finds too few places takes the turn: until it has its places, no other process takes one. Then
    it leaves the turn to the others for two polls, so that processes that always have requests waiting alternate.
    """

    def __init__(self, folder: Path, count: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._free = [_open(folder / f"{PLACE_PREFIX}{i}") for i in range(count)]
        self._taken: list[int] = []
        self._mutex, self._turn = _open(folder / MUTEX), _open(folder / "turn")
        self._has_turn = False
        self._may_wait_s = 0.0

    def take(self, number: int) -> bool:
        """Take so many places, or none."""
        fcntl.flock(self._mutex, fcntl.LOCK_EX)  # held for microseconds, so that two processes do not take half each
        try:
            if not self._has_turn and not _try_lock(self._turn):
                return False
            found: list[int] = []
            for place in self._free:
                if len(found) < number and _try_lock(place):
                    found.append(place)
            self._settle(found, number)
            return len(found) == number
        finally:
            fcntl.flock(self._mutex, fcntl.LOCK_UN)

    def give_back(self, number: int) -> None:
        """Free so many places."""
        for _ in range(number):
            place = self._taken.pop()
            fcntl.flock(place, fcntl.LOCK_UN)
            self._free.append(place)

    def stop_waiting(self) -> None:
        """Leave the turn to the other processes."""
        if self._has_turn:
            fcntl.flock(self._turn, fcntl.LOCK_UN)
            self._has_turn = False

    def _settle(self, found: list[int], number: int) -> None:
        """Keep the places that were found if they are enough, else free them; keep the turn if we wait and may."""
        now_s = time.monotonic()
        if len(found) == number:
            self._taken += found
            self._free = [place for place in self._free if place not in found]
            if self._has_turn:
                self._may_wait_s = now_s + 2 * POLL_S
            keeps_turn = False
        else:
            for place in found:
                fcntl.flock(place, fcntl.LOCK_UN)
            keeps_turn = now_s >= self._may_wait_s
        self._has_turn = keeps_turn
        if not keeps_turn:
            fcntl.flock(self._turn, fcntl.LOCK_UN)


def _open(file: Path) -> int:
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
