"""What Python does when native code fails: each function of a library says so in its result (guarded.h)."""

from __future__ import annotations

from orchestrator.core.errors import EngineError


def check(wrong: bytes | None, what: str) -> None:
    """Raise EngineError if a function of a library has returned what is wrong."""
    if wrong:
        raise EngineError(f"{what} failed in native code: {wrong.decode()}")


def made(handle: int | None, what: str) -> int:
    """Return the handle of a new object; raises EngineError if there is none."""
    if not handle:
        raise EngineError(f"native code could not create {what}: out of memory or threads")
    return handle


def counted(size: int, what: str) -> int:
    """Return a number that is below 0 if the function that returned it has failed; raises EngineError then."""
    if size < 0:
        raise EngineError(f"{what} failed in native code: out of memory")
    return size
