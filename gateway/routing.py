"""Which replica serves a request: the one that its key, or its prompt's beginning, maps to unless that is too busy."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

PREFIX_CHARACTERS = 256
PREFIX_IDS = 64


class Candidate(Protocol):
    """A replica as routing needs it. num_running: requests that the gateway has on it."""

    @property
    def address(self) -> str: ...  # noqa: D102

    @property
    def num_running(self) -> int: ...  # noqa: D102


Chosen = TypeVar("Chosen", bound=Candidate)


def affinity_key(inputs: Mapping[str, Any], name: str = "") -> bytes:
    """Return what requests have in common that may share cached KV blocks: the salt, and the prompt's beginning.

    name: what the client gives to requests that belong together, instead of the beginning, which all may share.
    """
    beginning = name or inputs.get("text_input", "")[:PREFIX_CHARACTERS] or inputs.get("input_ids", [])[:PREFIX_IDS]
    key = repr((inputs.get("cache_salt", ""), beginning)).encode()
    return hashlib.blake2b(key, digest_size=16).digest()  # a name may be long, and is hashed again for each replica


def rank(key: bytes, address: str) -> int:
    """Return the weight of a replica for a key, 64 bits; a replica that joins or leaves moves only its own keys.

    Source: rendezvous hashing, Thaler and Ravishankar 1998.
    """
    return int.from_bytes(hashlib.blake2b(key, key=address.encode()[:64], digest_size=8).digest())


def choose(candidates: Sequence[Chosen], key: bytes, slack: int) -> Chosen | None:
    """Return the highest-ranked replica with at most `slack` more requests than the idlest; None without candidates."""
    fewest = min((replica.num_running for replica in candidates), default=0)
    allowed: Iterable[Chosen] = (replica for replica in candidates if replica.num_running <= fewest + slack)
    return max(allowed, key=lambda replica: rank(key, replica.address), default=None)
