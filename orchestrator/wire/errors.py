"""How an engine's error crosses to its caller: Triton carries it as text alone."""

from __future__ import annotations

from orchestrator.core.errors import EngineError, EngineLost, RequestError, ServingError, Unavailable, UnknownSequence

# The first word says which of ours it is; the first kind that fits names it.
_CODES: dict[str, type[ServingError]] = {
    "unknown_sequence": UnknownSequence,
    "unavailable": Unavailable,
    "request": RequestError,
    "lost": EngineLost,
    "engine": EngineError,
}


def error_text(error: ServingError) -> str:
    """Word an error for the wire."""
    code = next((c for c, kind in _CODES.items() if isinstance(error, kind)), "engine")
    return f"{code}: {error}"


def error_from(text: str) -> ServingError:
    """Return the error that `text` words; text of Triton's own means that the engine was not reached."""
    code, _, message = text.partition(": ")
    kind = _CODES.get(code)
    return kind(message) if kind else EngineLost(text)
