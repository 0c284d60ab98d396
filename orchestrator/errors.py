"""Every error that this project raises on purpose; a message says what was wrong, the value, what is allowed, and where.

ServingError
├── ConfigError          a deployment's file or environment is wrong (launcher: exit 2)
├── RequestError         a request is wrong (the client's to mend)
├── Unavailable          the request is fine, the server cannot take it now
├── UnknownSequence      an engine lacks the tokens before `context_start` (the loop resends them)
└── EngineError          an engine failed or answered what the protocol does not allow
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ServingError(Exception):
    """Base of all errors with a message fit for a user."""


class ConfigError(ServingError):
    """A deployment's configuration is wrong."""


class RequestError(ServingError):
    """A client's request is wrong."""


class Unavailable(ServingError):
    """The server cannot take the request now."""


class UnknownSequence(ServingError):
    """An engine does not hold the tokens before `context_start`."""


class EngineError(ServingError):
    """An engine failed, or its answer breaks the protocol."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name most like `name`, or None when nothing is like it."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return matches[0] if matches else None


def unknown_name(what: str, name: str, known: Iterable[str], where: str) -> str:
    """Word the refusal of an unknown name: the nearest known one, and all that are allowed."""
    allowed = sorted(known)
    guess = nearest(name, allowed)
    hint = f"; did you mean {guess!r}?" if guess else ""
    return f"unknown {what} {name!r}{hint} (allowed: {', '.join(allowed)}; {where})"
