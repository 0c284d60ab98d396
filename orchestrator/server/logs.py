"""The log of a Triton model's process: Python's, on standard error, which Triton passes on to the server's log."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from orchestrator.core.deployment.config import LOG_LEVEL
from orchestrator.core.errors import ConfigError, unknown_name

LEVELS = {"error": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO, "verbose": logging.DEBUG}
#: Packages that log at the level that was set; others log warnings at most.
OURS = ("orchestrator", "runtime")
#: Characters of a request's id that a log line shows: as many as the gateway lets an id have.
MAX_ID = 128


def configure_logging(model: str, environ: Mapping[str, str] = os.environ) -> None:
    """Log with time, level and model; the launcher sets the level. Raises ConfigError for an unknown one."""
    name = environ.get(LOG_LEVEL) or "warning"
    if name not in LEVELS:
        raise ConfigError(unknown_name("log level", name, LEVELS, f"environment variable {LOG_LEVEL}"))
    logging.basicConfig(
        format=f"%(asctime)s %(levelname)s {model} %(name)s: %(message)s", level=max(LEVELS[name], logging.WARNING)
    )
    for package in OURS:
        logging.getLogger(package).setLevel(LEVELS[name])


def request_name(request_id: str) -> str:
    """Return how a log line names a request; its id is quoted and cut, because clients choose it."""
    return f"request {request_id[:MAX_ID]!r}" if request_id else "a request without an id"
