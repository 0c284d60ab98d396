"""How long a server may take to load its models, and to finish its requests at the end; knows nothing of servers."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from orchestrator.core.declarations import Declaration, parse_text, validate

READY_S, STOP_S, _LONGEST_S = 180, 10, 24 * 3600


class TimeLimits(Declaration):
    """Limits in seconds."""

    #: from the start until all models are ready, and for each model that is reloaded
    ready: int = Field(READY_S, ge=1, le=_LONGEST_S)
    #: for the requests that run when the server is stopped
    stop: int = Field(STOP_S, ge=1, le=_LONGEST_S)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> TimeLimits:
        """Read READY_LIMIT_S and STOP_LIMIT_S; raises ConfigError for anything but a number of seconds."""
        names = {key: f"{key.upper()}_LIMIT_S" for key in cls.model_fields}
        values = {key: parse_text(cls, key, environ[name]) for key, name in names.items() if environ.get(name)}
        return validate(cls, values, lambda key: f"seconds; environment variable {names[key]}")
