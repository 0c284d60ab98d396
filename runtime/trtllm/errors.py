"""Errors of whatever lies below a line, in words that may be answered."""

from __future__ import annotations

import logging

from orchestrator.core.errors import EngineError, ServingError, first_line

log = logging.getLogger(__name__)


def wrap_error(what: str, error: Exception) -> ServingError:
    """Return an error of ours as it is, any other as an EngineError that begins with `what`."""
    if isinstance(error, ServingError):
        return error
    log.error("%s", what, exc_info=error)
    return EngineError(f"{what}: {first_line(error)}")
