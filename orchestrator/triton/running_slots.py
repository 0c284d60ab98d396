"""Slots for running sequences: of one process, or shared by the processes of a deployment."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from enum import Enum, auto
from pathlib import Path

from orchestrator.deployment.drain_state import MUTEX, SLOT_PREFIX

#: How often a waiting process checks whether another process has freed a slot.
POLL_S = 0.05


class Taking(Enum):
    """The outcome of an attempt to take slots; only TAKEN changes anything."""

    TAKEN = auto()
    TOO_FEW = auto()
    TENANT_AT_LIMIT = auto()


class RunningSlots:
    """The slots of one process; one thread at a time may call. tenant_limit: maximum of one tenant, None = all."""

    def __init__(self, count: int, tenant_limit: int | None = None) -> None:
        self._count = self._num_free = count
        self._tenant_limit = tenant_limit
        self._num_of: dict[str, int] = {}

    def take(self, number: int, tenant: str = "") -> Taking:
        """Take all of `number` slots for a tenant, or leave them all."""
        held = self._num_of.get(tenant, 0) + number
        if self._tenant_limit is not None and held > self._tenant_limit:
            return Taking.TENANT_AT_LIMIT
        if number > self._num_free:
            return Taking.TOO_FEW
        self._num_free -= number
        self._num_of[tenant] = held
        return Taking.TAKEN

    def give_back(self, number: int, tenant: str = "") -> None:
        """Free `number` slots of a tenant."""
        self._num_free += number
        self._num_of[tenant] -= number
        if not self._num_of[tenant]:
            del self._num_of[tenant]

    def resize(self, count: int, tenant_limit: int | None) -> None:
        """Change the limits; a taken slot beyond the new number disappears when it is given back."""
        self._num_free += count - self._count
        self._count, self._tenant_limit = count, tenant_limit

    def stop_waiting(self) -> None:
        """Let other processes take the next slots, because nothing waits here any more."""


class SharedRunningSlots(RunningSlots):
    """The slots of a deployment, shared by all processes that are given the same folder.

    Each slot is a file. A process takes it by locking it, and writes a digest of its tenant into it, also without a
    tenant_limit, since a reload may set one; the kernel frees the locks of a process that dies. A process that finds
    too few slots keeps the turn, which is another lock: until it has its slots, no other process takes one. Then it
    leaves the turn to the others for two polls, so that processes in which requests always wait alternate.
    """

    def __init__(self, folder: Path, count: int, tenant_limit: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._tenant_limit = tenant_limit
        self._all = [_open(folder / f"{SLOT_PREFIX}{i}") for i in range(count)]
        self._folder, self._count, self._free = folder, count, list(self._all)
        self._taken: list[tuple[int, str]] = []
        self._mutex, self._turn = _open(folder / MUTEX), _open(folder / "turn")
        self._has_turn = False
        self._may_wait_s = 0.0

    def take(self, number: int, tenant: str = "") -> Taking:
        """Take all of `number` slots for a tenant, or leave them all."""
        fcntl.flock(self._mutex, fcntl.LOCK_EX)  # held for microseconds, so that two processes do not take half each
        try:
            if self._tenant_limit is not None and self._num_held_by(tenant) + number > self._tenant_limit:
                return Taking.TENANT_AT_LIMIT
            if not self._has_turn and not _try_lock(self._turn):
                return Taking.TOO_FEW
            found: list[int] = []
            for slot in self._free:
                if len(found) < number and _try_lock(slot):
                    found.append(slot)
            self._settle(found, number, tenant)
            return Taking.TAKEN if len(found) == number else Taking.TOO_FEW
        finally:
            fcntl.flock(self._mutex, fcntl.LOCK_UN)

    def give_back(self, number: int, tenant: str = "") -> None:
        """Free `number` slots of a tenant."""
        for _ in range(number):
            held = next(held for held in reversed(self._taken) if held[1] == tenant)
            self._taken.remove(held)
            fcntl.flock(held[0], fcntl.LOCK_UN)
            if held[0] in self._all[: self._count]:
                self._free.append(held[0])

    def resize(self, count: int, tenant_limit: int | None) -> None:
        """Change the limits; each of the processes that share the slots must."""
        self._all += [_open(self._folder / f"{SLOT_PREFIX}{i}") for i in range(len(self._all), count)]
        taken = {slot for slot, _ in self._taken}
        self._count, self._tenant_limit = count, tenant_limit
        self._free = [slot for slot in self._all[:count] if slot not in taken]

    def stop_waiting(self) -> None:
        """Leave the turn to the other processes."""
        if self._has_turn:
            fcntl.flock(self._turn, fcntl.LOCK_UN)
            self._has_turn = False

    def _num_held_by(self, tenant: str) -> int:
        """Return how many slots a tenant holds in all processes. Caller holds the mutex."""
        number, digest = sum(name == tenant for _, name in self._taken), _digest(tenant)
        for slot in self._free:  # not taken by this process
            if _try_lock(slot):
                fcntl.flock(slot, fcntl.LOCK_UN)
            elif os.pread(slot, len(digest), 0) == digest:
                number += 1
        return number

    def _settle(self, found: list[int], number: int, tenant: str) -> None:
        """Keep the slots found if they are enough; else free them, and keep the turn once others have had it."""
        now_s = time.monotonic()
        if len(found) == number:
            for slot in found:
                os.pwrite(slot, _digest(tenant), 0)
            self._taken += [(slot, tenant) for slot in found]
            self._free = [slot for slot in self._free if slot not in found]
            if self._has_turn:
                self._may_wait_s = now_s + 2 * POLL_S
            keeps_turn = False
        else:
            for slot in found:
                fcntl.flock(slot, fcntl.LOCK_UN)
            keeps_turn = now_s >= self._may_wait_s
        self._has_turn = keeps_turn
        if not keeps_turn:
            fcntl.flock(self._turn, fcntl.LOCK_UN)


def _digest(tenant: str) -> bytes:
    return hashlib.blake2b(tenant.encode(), digest_size=16).digest()


def _open(file: Path) -> int:
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
