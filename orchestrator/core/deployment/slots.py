"""The slots of a deployment's running sequences: files that processes lock, and that the kernel frees when one dies."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import os
import struct
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_SLOT, _MUTEX, _TURNS = "slot-", "mutex", "turns"
#: A turn that was written longer ago does not count: its process renews it unless it is stopped or has ended.
STALE_S = 1.0
#: What a taken slot's file holds: the digest of its tenant, and the tokens of its sequence.
_HOLDER = struct.Struct("<16sq")
#: What a process writes into its file below _TURNS: the turn of its first request, and when that was written.
_TURN = struct.Struct("<dd")


class Share(NamedTuple):
    """What a tenant has: running sequences, and the tokens that they may come to."""

    slots: int = 0
    tokens: int = 0


class TenantLimits(NamedTuple):
    """The most that one tenant may have at once, None = all there is.

    slots: running sequences. tokens: what they may come to, prompts and outputs together; a tenant of which nothing
    runs may begin any request.
    """

    slots: int | None = None
    tokens: int | None = None

    @property
    def are_set(self) -> bool:
        """True if a tenant may be at its limit while there are free slots."""
        return self.slots is not None or self.tokens is not None

    def allow(self, held: Share, number: int, num_tokens: int) -> bool:
        """Return whether a tenant that holds this may take `number` more slots, each for so many tokens."""
        if self.slots is not None and held.slots + number > self.slots:
            return False
        return self.tokens is None or not held.slots or held.tokens + number * num_tokens <= self.tokens


NO_LIMITS = TenantLimits()


class Slots:
    """`count` slots, shared by all processes that are given the same folder; one thread at a time may call.

    Each process says when the turn of its first waiting request is, and takes no slot while the turn of another's is
    earlier; so none takes all of them. Call everything within `alone`, which keeps the other processes out.
    """

    def __init__(self, folder: Path, count: int) -> None:
        (folder / _TURNS).mkdir(parents=True, exist_ok=True)
        self._turns, self._turn_s = folder / _TURNS, math.inf
        self._own = self._turns / f"{os.getpid()}-{id(self)}"
        self._files = [_open(folder / f"{_SLOT}{i}") for i in range(count)]
        self._free = list(self._files)
        self._mutex = _open(folder / _MUTEX)
        weakref.finalize(self, _close, [*self._files, self._mutex])

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep the other processes out for microseconds, so that two of them do not take half each."""
        fcntl.flock(self._mutex, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._mutex, fcntl.LOCK_UN)

    def take(self, number: int, tenant: str, num_tokens: int, turn_s: float) -> list[int]:
        """Take and return `number` slots for a tenant, or none at all.

        num_tokens: what each of them may come to. turn_s: when the turn of the request is, by time.monotonic().
        """
        if number > len(self._free) or self._first_of_others() < turn_s:
            return []
        taken: list[int] = []
        for slot in self._free:
            if len(taken) < number and _lock(slot):
                taken.append(slot)
        if len(taken) < number:
            self._unlock(taken)
            return []
        for slot in taken:
            os.pwrite(slot, _HOLDER.pack(_digest(tenant), num_tokens), 0)
        self._free = [slot for slot in self._free if slot not in taken]
        return taken

    def give_back(self, slots: Iterable[int]) -> None:
        """Free slots that `take` has returned."""
        slots = list(slots)
        self._unlock(slots)
        self._free += slots

    def share_of(self, tenant: str) -> Share:
        """Return what a tenant holds in all processes."""
        held, digest, free = Share(), _digest(tenant), {*self._free}
        for slot in self._files:
            content = os.pread(slot, _HOLDER.size, 0)
            if (slot not in free or _is_locked(slot)) and len(content) == _HOLDER.size:
                holder, num_tokens = _HOLDER.unpack(content)
                held = Share(held.slots + 1, held.tokens + num_tokens) if holder == digest else held
        return held

    def wait_for(self, turn_s: float) -> None:
        """Say when the turn of the first request that waits for a slot is; infinite = none waits."""
        if min(turn_s, self._turn_s) < math.inf:
            self._own.write_bytes(_TURN.pack(turn_s, time.monotonic()))
        self._turn_s = turn_s

    def _first_of_others(self) -> float:
        first, now_s = math.inf, time.monotonic()
        for file in self._turns.iterdir():
            if file != self._own and len(content := file.read_bytes()) == _TURN.size:
                turn_s, written_s = _TURN.unpack(content)
                first = min(first, turn_s if now_s - written_s < STALE_S else math.inf)
        return first

    @staticmethod
    def _unlock(slots: Iterable[int]) -> None:
        for slot in slots:
            fcntl.flock(slot, fcntl.LOCK_UN)


def num_running(folder: Path) -> int:
    """Return how many slots of a folder are taken now."""
    if not (folder / _MUTEX).exists():  # no public model has been loaded
        return 0
    files = [_open(path) for path in (folder / _MUTEX, *folder.glob(f"{_SLOT}*"))]
    try:
        fcntl.flock(files[0], fcntl.LOCK_EX)
        return sum(_is_locked(slot) for slot in files[1:])
    finally:
        _close(files)


def _digest(tenant: str) -> bytes:
    return hashlib.blake2b(tenant.encode(), digest_size=16).digest()


def _open(file: Path) -> int:
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _close(files: Iterable[int]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            os.close(file)


def _lock(file: int) -> bool:
    """Lock a file; return False if another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_locked(file: int) -> bool:
    """Return whether another process has locked a file."""
    if _lock(file):
        fcntl.flock(file, fcntl.LOCK_UN)
        return False
    return True
