"""How long a server may take to load its models, and to finish its requests at the end; knows nothing of servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.core.errors import ConfigError

_LONGEST_S = 24 * 3600


@dataclass(frozen=True)
class TimeLimits:
    """In seconds. ready: from the start until all models are ready, and for each model that is reloaded. stop: for
    the requests that run when the server is stopped.
    """

    ready: int = 180
    stop: int = 10

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> TimeLimits:
        """Read READY_LIMIT_S and STOP_LIMIT_S; raises ConfigError for what is no number of seconds."""
        usual = vars(cls())
        return cls(**{name: _seconds(environ, f"{name.upper()}_LIMIT_S", usual[name]) for name in usual})


def _seconds(environ: Mapping[str, str], name: str, usual: int) -> int:
    text = environ.get(name) or str(usual)
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= _LONGEST_S):
        raise ConfigError(f"{name} must be a whole number of seconds in 1..{_LONGEST_S}, got {text!r} ({name})")
    return int(text)
