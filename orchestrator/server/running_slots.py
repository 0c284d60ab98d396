"""Slots for running sequences: of one process, or shared by the processes of a deployment."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from orchestrator.core.deployment.drain_state import MUTEX, SLOT_PREFIX
from orchestrator.core.deployment.locks import closed_with, holding, is_locked, open_lock, try_lock, unlock
from orchestrator.server.claims import Claim, SharedClaims
from orchestrator.server.tenants import NO_LIMITS, Share, Taking, TenantLimits, digest_of

#: What a taken slot's file holds: the digest of its tenant and the tokens of its sequence.
_HOLDER = struct.Struct("<16sq")


class RunningSlots:
    """The slots of one process; one thread at a time may call."""

    def __init__(self, count: int, limits: TenantLimits = NO_LIMITS) -> None:
        self._count = self._num_free = count
        self._limits = limits
        self._held_by: dict[str, Share] = {}

    def take(self, number: int, tenant: str = "", num_tokens: int = 0, turn_s: float = 0.0) -> Taking:
        """Take all of `number` slots for a tenant, or leave them all.

        num_tokens: what each of them may come to. turn_s: when the turn of the request is, by time.monotonic().
        """
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

    def claim(self, claims: Sequence[Claim]) -> None:
        """Let no other process take a slot before these requests, which got none, have had their turns."""

    def wait_for_others(self, timeout_s: float) -> bool:
        """Wait until another process may have made room, at most so long; return whether it may have."""
        time.sleep(max(timeout_s, 0.0))
        return False


class SharedRunningSlots(RunningSlots):
    """The slots of a deployment, shared by all processes that are given the same folder.

    Each slot is a file. A process takes it by locking it, and writes into it whose it is and for how many tokens, also
    without limits, since a reload may set some; the kernel frees the locks of a process that dies. A request takes no
    slot while one whose turn is earlier waits for it in another process. So all processes together start requests in
    one order, as a single queue would. A process that frees a slot, or claims none any more, wakes those that wait.
    """

    def __init__(self, folder: Path, count: int, limits: TenantLimits = NO_LIMITS) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._limits = limits
        self._all = [open_lock(folder / f"{SLOT_PREFIX}{i}") for i in range(count)]
        self._folder, self._count, self._free = folder, count, list(self._all)
        self._taken: list[tuple[int, str, int]] = []
        self._mutex = open_lock(folder / MUTEX)
        for files in (self._all, [self._mutex]):
            closed_with(self, files)
        self._claimed: Sequence[Claim] = ()
        self._has_freed = False
        with self._alone():
            self._claims = SharedClaims(folder)

    def take(self, number: int, tenant: str = "", num_tokens: int = 0, turn_s: float = 0.0) -> Taking:
        """Take all of `number` slots for a tenant, or leave them all.

        num_tokens: what each of them may come to. turn_s: when the turn of the request is, by time.monotonic().
        """
        with self._alone():
            earlier = [claim for claim in self._claims.of_others() if claim.turn_s < turn_s]
            if not all(claim.is_at_limit for claim in earlier):
                return Taking.TOO_FEW
            if self._limits.are_set:
                digest = digest_of(tenant)
                is_overtaking = any(claim.tenant == digest for claim in earlier)
                if is_overtaking or not self._limits.allow(self._held_in_all(tenant), number, num_tokens):
                    return Taking.TENANT_AT_LIMIT
            return self._take(number, tenant, num_tokens)

    def give_back(self, number: int, tenant: str = "", num_tokens: int = 0) -> None:
        """Free `number` slots of a tenant, each of which was taken for so many tokens."""
        for _ in range(number):
            held = next(held for held in reversed(self._taken) if held[1:] == (tenant, num_tokens))
            self._taken.remove(held)
            unlock(held[0])
            if held[0] in self._all[: self._count]:
                self._free.append(held[0])
        self._has_freed = True

    def resize(self, count: int, limits: TenantLimits) -> None:
        """Change the limits; each of the processes that share the slots must."""
        self._all += [open_lock(self._folder / f"{SLOT_PREFIX}{i}") for i in range(len(self._all), count)]
        taken = {slot for slot, *_ in self._taken}
        self._count, self._limits = count, limits
        self._free = [slot for slot in self._all[:count] if slot not in taken]

    def claim(self, claims: Sequence[Claim]) -> None:
        """Let no other process take a slot before these requests, which got none, have had their turns.

        A claim holds for STALE_S only, so that a process that is stopped does not hold up the others: claim again.
        """
        has_news = self._has_freed or claims != self._claimed
        if has_news or claims:
            with self._alone():
                self._claims.write(claims)
                if has_news:
                    self._claims.wake_others()
        self._claimed, self._has_freed = claims, False

    def wait_for_others(self, timeout_s: float) -> bool:
        """Wait until another process may have made room, at most so long; return whether it may have."""
        return self._claims.wait(timeout_s)

    def _alone(self) -> AbstractContextManager[None]:
        """Keep the other processes out for microseconds, so that two of them do not take half each."""
        return holding(self._mutex)

    def _take(self, number: int, tenant: str, num_tokens: int) -> Taking:
        """Take slots without looking at who else wants them. Caller holds the mutex."""
        found: list[int] = []
        for slot in self._free:
            if len(found) < number and try_lock(slot):
                found.append(slot)
        if len(found) < number:
            for slot in found:
                unlock(slot)
            return Taking.TOO_FEW
        for slot in found:
            os.pwrite(slot, _HOLDER.pack(digest_of(tenant), num_tokens), 0)
        self._taken += [(slot, tenant, num_tokens) for slot in found]
        self._free = [slot for slot in self._free if slot not in found]
        return Taking.TAKEN

    def _held_in_all(self, tenant: str) -> Share:
        """Return what a tenant holds in all processes. Caller holds the mutex."""
        held, digest = [num_tokens for _, name, num_tokens in self._taken if name == tenant], digest_of(tenant)
        for slot in self._free:  # not taken by this process
            if is_locked(slot) and len(content := os.pread(slot, _HOLDER.size, 0)) == _HOLDER.size:
                holder, num_tokens = _HOLDER.unpack(content)
                held += [num_tokens] if holder == digest else []
        return Share(len(held), sum(held))
