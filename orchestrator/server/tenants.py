"""What one tenant may have of a deployment at once."""

from __future__ import annotations

import hashlib
from enum import Enum, auto
from typing import NamedTuple


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


def digest_of(tenant: str) -> bytes:
    """Return 16 bytes that stand for a tenant."""
    return hashlib.blake2b(tenant.encode(), digest_size=16).digest()
