"""Slots for running sequences: of one process, or shared by the processes of a deployment."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from orchestrator.deployment.drain_state import MUTEX, SLOT_PREFIX
from orchestrator.triton.tenants import (
    NO_LIMITS,
    POLL_S,
    Share,
    Taking,
    TenantLimits,
    TenantTurns,
    digest_of,
    open_lock,
)

#: What a taken slot's file holds: the digest of its tenant and the tokens of its sequence.
_HOLDER = struct.Struct("<16sq")


class RunningSlots:
    """The slots of one process; one thread at a time may call."""

    def __init__(self, count: int, limits: TenantLimits = NO_LIMITS) -> None:
        self._count = self._num_free = count
        self._limits = limits
        self._held_by: dict[str, Share] = {}

    def take(self, number: int, tenant: str = "", num_tokens: int = 0) -> Taking:
        """Take all of `number` slots for a tenant, or leave them all. num_tokens: what each of them may come to."""
        held = self._held_by.get(tenant, Share())
        if not self._limits.allow(held, number, num_tokens):
            return Taking.TENANT_AT_LIMIT
        if number > self._num_free:
            return Taking.TOO_FEW
        self._num_free -= number
        self._held_by[tenant] = Share(held.slots + number, held.tokens + number * num_tokens)
        return Taking.TAKEN

    def give_back(self, number: int, tenant: str = "", num_tokens: int = 0) -> None:
        """Free `number` slots of a tenant, each of which was taken for so many tokens."""
        self._num_free += number
        held = self._held_by.pop(tenant)
        if held.slots > number:
            self._held_by[tenant] = Share(held.slots - number, held.tokens - number * num_tokens)

    def resize(self, count: int, limits: TenantLimits) -> None:
        """Change the limits; a taken slot beyond the new number disappears when it is given back."""
        self._num_free += count - self._count
        self._count, self._limits = count, limits

    def stop_waiting(self) -> None:
        """Let other processes take the next slots, because nothing waits here any more."""

    def keep_turns_of(self, tenants: Iterable[str]) -> None:
        """Let other processes take the next slots of all other tenants, because those wait here no more."""


class SharedRunningSlots(RunningSlots):
    """The slots of a deployment, shared by all processes that are given the same folder.

    Each slot is a file. A process takes it by locking it, and writes into it whose it is and for how many tokens, also
    without limits, since a reload may set some; the kernel frees the locks of a process that dies. A process that finds
    too few slots keeps the turn, which is another lock: until it has its slots, no other process takes one. Then it
    leaves the turn to the others for two polls, so that processes in which requests always wait alternate. A process
    that finds a tenant at its limit keeps the turn of this tenant in the same way.
    """

    def __init__(self, folder: Path, count: int, limits: TenantLimits = NO_LIMITS) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._limits = limits
        self._all = [open_lock(folder / f"{SLOT_PREFIX}{i}") for i in range(count)]
        self._folder, self._count, self._free = folder, count, list(self._all)
        self._taken: list[tuple[int, str, int]] = []
        self._mutex, self._turn = open_lock(folder / MUTEX), open_lock(folder / "turn")
        self._has_turn = False
        self._may_wait_s = 0.0
        self._tenant_turns = TenantTurns(folder)

    def take(self, number: int, tenant: str = "", num_tokens: int = 0) -> Taking:
        """Take all of `number` slots for a tenant, or leave them all. num_tokens: what each of them may come to."""
        with self._alone():
            if not self._limits.are_set:
                return self._take(number, tenant, num_tokens)
            if not self._tenant_turns.take(tenant):
                return Taking.TENANT_AT_LIMIT
            if self._limits.allow(self._held_in_all(tenant), number, num_tokens):
                taking = self._take(number, tenant, num_tokens)
            else:
                taking = Taking.TENANT_AT_LIMIT
            self._tenant_turns.settle(tenant, taking)
            return taking

    def give_back(self, number: int, tenant: str = "", num_tokens: int = 0) -> None:
        """Free `number` slots of a tenant, each of which was taken for so many tokens."""
        for _ in range(number):
            held = next(held for held in reversed(self._taken) if held[1:] == (tenant, num_tokens))
            self._taken.remove(held)
            fcntl.flock(held[0], fcntl.LOCK_UN)
            if held[0] in self._all[: self._count]:
                self._free.append(held[0])

    def resize(self, count: int, limits: TenantLimits) -> None:
        """Change the limits; each of the processes that share the slots must."""
        self._all += [open_lock(self._folder / f"{SLOT_PREFIX}{i}") for i in range(len(self._all), count)]
        taken = {slot for slot, *_ in self._taken}
        self._count, self._limits = count, limits
        self._free = [slot for slot in self._all[:count] if slot not in taken]

    def stop_waiting(self) -> None:
        """Leave the turn to the other processes."""
        if self._has_turn:
            fcntl.flock(self._turn, fcntl.LOCK_UN)
            self._has_turn = False

    def keep_turns_of(self, tenants: Iterable[str]) -> None:
        """Leave the turns of all other tenants to the other processes."""
        self._tenant_turns.keep_only(tenants if self._limits.are_set else ())

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep the other processes out for microseconds, so that two of them do not take half each."""
        fcntl.flock(self._mutex, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._mutex, fcntl.LOCK_UN)

    def _take(self, number: int, tenant: str, num_tokens: int) -> Taking:
        """Take slots without looking at the tenant's limits. Caller holds the mutex."""
        if not self._has_turn and not _try_lock(self._turn):
            return Taking.TOO_FEW
        found: list[int] = []
        for slot in self._free:
            if len(found) < number and _try_lock(slot):
                found.append(slot)
        if is_enough := len(found) == number:
            for slot in found:
                os.pwrite(slot, _HOLDER.pack(digest_of(tenant), num_tokens), 0)
            self._taken += [(slot, tenant, num_tokens) for slot in found]
            self._free = [slot for slot in self._free if slot not in found]
        else:
            for slot in found:
                fcntl.flock(slot, fcntl.LOCK_UN)
        self._settle_turn(is_enough)
        return Taking.TAKEN if is_enough else Taking.TOO_FEW

    def _settle_turn(self, is_enough: bool) -> None:
        """Leave the turn to the others after slots were taken; else keep it, once the others have had it."""
        now_s = time.monotonic()
        if is_enough and self._has_turn:
            self._may_wait_s = now_s + 2 * POLL_S
        self._has_turn = not is_enough and now_s >= self._may_wait_s
        if not self._has_turn:
            fcntl.flock(self._turn, fcntl.LOCK_UN)

    def _held_in_all(self, tenant: str) -> Share:
        """Return what a tenant holds in all processes. Caller holds the mutex."""
        held, digest = [num_tokens for _, name, num_tokens in self._taken if name == tenant], digest_of(tenant)
        for slot in self._free:  # not taken by this process
            if _try_lock(slot):
                fcntl.flock(slot, fcntl.LOCK_UN)
            elif len(content := os.pread(slot, _HOLDER.size, 0)) == _HOLDER.size:
                holder, num_tokens = _HOLDER.unpack(content)
                held += [num_tokens] if holder == digest else []
        return Share(len(held), sum(held))


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
