"""What one tenant may have of a deployment at once, and which process takes the next of its slots."""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
import time
from collections.abc import Iterable
from enum import Enum, auto
from pathlib import Path
from typing import NamedTuple

#: How often a waiting process checks whether another process has freed a slot.
POLL_S = 0.05
#: `struct flock` of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid. Source: fcntl(2), F_OFD_SETLK.
_FLOCK = struct.Struct("hhqqi4x")


class Taking(Enum):
    """The outcome of an attempt to take slots; only TAKEN changes anything."""

    TAKEN = auto()
    TOO_FEW = auto()
    TENANT_AT_LIMIT = auto()


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


class TenantTurns:
    """For each tenant at its limit, which process takes the next of its slots; without this, narrow requests to one
    public model would overtake the tenant's wide request to the other for ever.

    A turn is the lock of one byte of a file, chosen by the tenant's digest; like the slots, it ends with its process.
    """

    def __init__(self, folder: Path) -> None:
        self._file = open_lock(folder / "tenant-turns")
        self._held: set[str] = set()
        self._may_wait_s: dict[str, float] = {}

    def take(self, tenant: str) -> bool:
        """Lock a tenant's turn until `settle`; return False if another process has it."""
        return tenant in self._held or _lock_byte(self._file, _place(tenant), fcntl.F_WRLCK)

    def settle(self, tenant: str, taking: Taking) -> None:
        """Leave the turn to the others after slots were taken; keep it at the limit, once the others have had it."""
        now_s = time.monotonic()
        if taking is Taking.TAKEN and tenant in self._held:
            self._may_wait_s[tenant] = now_s + 2 * POLL_S
        keeps = taking is Taking.TENANT_AT_LIMIT and now_s >= self._may_wait_s.get(tenant, 0.0)
        if keeps or (taking is Taking.TOO_FEW and tenant in self._held):
            self._held.add(tenant)
        else:
            self._leave(tenant)

    def keep_only(self, tenants: Iterable[str]) -> None:
        """Leave the turns of all other tenants."""
        if self._held:
            for tenant in self._held.difference(tenants):
                self._leave(tenant)
        if self._may_wait_s:
            now_s = time.monotonic()
            self._may_wait_s = {tenant: end_s for tenant, end_s in self._may_wait_s.items() if end_s > now_s}

    def _leave(self, tenant: str) -> None:
        self._held.discard(tenant)
        _lock_byte(self._file, _place(tenant), fcntl.F_UNLCK)


def digest_of(tenant: str) -> bytes:
    """Return 16 bytes that stand for a tenant."""
    return hashlib.blake2b(tenant.encode(), digest_size=16).digest()


def _place(tenant: str) -> int:
    """Return the byte that stands for a tenant; of 2⁶² no two tenants share one."""
    return int.from_bytes(digest_of(tenant)[:8]) >> 2


def open_lock(file: Path) -> int:
    """Open a file to lock it, and make it if there is none; return its descriptor."""
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _lock_byte(file: int, place: int, kind: int) -> bool:
    """Lock or unlock (F_WRLCK, F_UNLCK) a byte, which need not exist; return False if another process has it."""
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, place, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True
