"""All errors raised on purpose. A message says what is wrong, the value, what is allowed, and where to correct it.

ServingError
├── ConfigError          a deployment's file or environment is wrong (launcher: exit 2)
├── RequestError         a request is wrong (the client must correct it)
├── Unavailable          the request is valid, but the server cannot take it now
│   ├── QueueFull        because its queue is full
│   │   └── SaltQueueFull  for requests of this cache_salt; there may be room for others
│   └── Draining         because it takes no new requests: it drains, or is shutting down
├── ClientDisconnected   nobody is waiting for the answer any more: the client has gone
├── UnknownSequence      an engine lacks the tokens before `context_start` (the loop resends them)
└── EngineError          an engine failed, or its answer breaks the protocol
    └── EngineLost       Triton cannot reach the engine: its process died or is being restarted
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import numpy as np

MAX_SHOWN = 100


class ServingError(Exception):
    """Base of all errors whose message may be shown to a user."""


class ConfigError(ServingError):
    """A deployment's configuration is wrong."""


class RequestError(ServingError):
    """A client's request is wrong."""


class Unavailable(ServingError):
    """The server cannot take the request now. code: how a client's error begins (docs/protocol.md, Errors)."""

    code = "busy"


class QueueFull(Unavailable):
    """The server's queue is full."""

    code = "full"


class SaltQueueFull(QueueFull):
    """The server's queue is full for requests of this cache_salt; there may be room for others."""

    code = "full_for_salt"


class Draining(Unavailable):
    """The server takes no new requests, because it drains or is shutting down."""

    code = "draining"


class ClientDisconnected(ServingError):
    """Nobody is waiting for the answer any more."""


class UnknownSequence(ServingError):
    """An engine does not hold the tokens before `context_start`."""


class EngineError(ServingError):
    """An engine failed, or its answer breaks the protocol."""


class EngineLost(EngineError):
    """Triton cannot reach the engine; it may be back in a few seconds."""


# Triton carries an error only as text, whose first word is this code. Subclasses come before their base class.
_CODES: dict[str, type[ServingError]] = {
    "unknown_sequence": UnknownSequence,
    "draining": Draining,
    "unavailable": Unavailable,
    "request": RequestError,
    "lost": EngineLost,
    "engine": EngineError,
}


def error_text(error: ServingError) -> str:
    """Return the text that carries an error over Triton: its code, then its message."""
    code = next((code for code, kind in _CODES.items() if isinstance(error, kind)), "engine")
    return f"{code}: {error}"


def error_from(text: str) -> ServingError:
    """Return the error that a text carries; a text without a code is Triton's own, so the engine was not reached."""
    code, _, message = text.partition(": ")
    kind = _CODES.get(code)
    return kind(message) if kind else EngineLost(text)


def public_text(error: ServingError) -> str:
    """Return the text of an error as a client gets it: that of an Unavailable begins with its code."""
    return f"{error.code}: {error}" if isinstance(error, Unavailable) else str(error)


def abbreviated(value: object) -> str:
    """Return a value as an error message shows it: shortened, since it may be a client's whole text."""
    text = _shortest(value) if isinstance(value, float) else repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _shortest(value: float) -> str:
    """Return a number of an FP32 tensor as its client wrote it: 0.1, not 0.10000000149011612."""
    with np.errstate(over="ignore"):
        single = np.float32(value)
    return str(single) if single == value else repr(value)


def first_line(error: object) -> str:
    """Return the first line of an error's message, or the name of its class if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint at the known name most similar to `name`, or "" if nothing is similar."""
    matches = difflib.get_close_matches(name[:MAX_SHOWN], list(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def unknown_name(what: str, name: str, known: Iterable[str], where: str) -> str:
    """Return the error message for an unknown name: the nearest known name, and all allowed names."""
    allowed = sorted(known)
    return f"unknown {what} {abbreviated(name)}{did_you_mean(name, allowed)} (allowed: {', '.join(allowed)}; {where})"
