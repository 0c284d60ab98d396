"""What waits in each process of a deployment, so that all of them start requests in one order."""

from __future__ import annotations

import contextlib
import os
import select
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from orchestrator.core.deployment.locks import closed_with, open_lock, try_lock

#: Claims older than this do not count: their process renews them with every poll, unless it is stopped or has ended.
STALE_S = 1.0
#: A file of claims: when they were written, by time.monotonic(), and how many there are; then each of them.
_HEADER, _CLAIM = struct.Struct("<dq"), struct.Struct("<d16s?")


class Claim(NamedTuple):
    """A waiting request that others must not overtake.

    turn_s: its place in the order, by the clock that all processes share. tenant: its digest. is_at_limit: only
    requests of this tenant must not overtake it, because it does not wait for a slot but for those of its tenant.
    """

    turn_s: float
    tenant: bytes
    is_at_limit: bool


class _Place(NamedTuple):
    """The files of one process: its claims, locked while it lives so that no other takes the place, and its bell.

    bell: a FIFO that wakes the process.
    """

    claims: int
    bell: int

    @classmethod
    def open(cls, folder: Path, number: int) -> _Place:
        bell = folder / f"bell-{number}"
        with contextlib.suppress(FileExistsError):
            os.mkfifo(bell, 0o600)
        # The file of claims comes last: whoever finds it finds the bell too.
        file = os.open(bell, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        return cls(open_lock(folder / f"waiting-{number}"), file)


class SharedClaims:
    """The claims of this process and those of the others; the caller keeps the others out, except in `wait`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._others: list[_Place] = []
        self._files: list[int] = []
        closed_with(self, self._files)
        while not try_lock((place := self._open(len(self._others))).claims):
            self._others.append(place)
        self._own = place
        self.write(())

    def write(self, claims: Iterable[Claim]) -> None:
        """Replace the claims of this process."""
        packed = [_CLAIM.pack(*claim) for claim in claims]
        os.pwrite(self._own.claims, _HEADER.pack(time.monotonic(), len(packed)) + b"".join(packed), 0)

    def of_others(self) -> list[Claim]:
        """Return the claims of the other processes."""
        return [claim for place in self._places_of_others() for claim in _read(place)]

    def wake_others(self) -> None:
        """Wake the processes in which requests wait."""
        for place in self._places_of_others():
            if _read(place):
                with contextlib.suppress(BlockingIOError):  # it is full: the process will wake anyway
                    os.write(place.bell, b"\0")

    def wait(self, timeout_s: float) -> bool:
        """Wait until another process wakes this one; return False if none does in time."""
        if timeout_s <= 0 or not select.select([self._own.bell], [], [], timeout_s)[0]:
            return False
        os.read(self._own.bell, select.PIPE_BUF)
        return True

    def _places_of_others(self) -> list[_Place]:
        while (self._folder / f"waiting-{len(self._others) + 1}").exists():
            self._others.append(self._open(len(self._others) + 1))
        return self._others

    def _open(self, number: int) -> _Place:
        place = _Place.open(self._folder, number)
        self._files += place
        return place


def _read(place: _Place) -> list[Claim]:
    """Return the claims of a process, none if it has not renewed them."""
    header = os.pread(place.claims, _HEADER.size, 0)
    if len(header) < _HEADER.size:  # a process that was killed before it wrote
        return []
    written_s, number = _HEADER.unpack(header)
    if not number or time.monotonic() - written_s > STALE_S:
        return []
    return [Claim(*each) for each in _CLAIM.iter_unpack(os.pread(place.claims, number * _CLAIM.size, _HEADER.size))]
