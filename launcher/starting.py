"""Waits for a server that loads its models."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher import log
from launcher.admin import Admin
from orchestrator.core.errors import ServingError

_POLL_S = 0.1


class StartError(ServingError):
    """The server did not come up; the message has the cause from its log."""


class AbortedStart(StartError):
    """Triton aborted while it loaded its models."""


def wait_until_ready(
    server: subprocess.Popen[bytes],
    models: Sequence[str],
    admin: Admin,
    log_path: Path,
    began_s: float,
    limit_s: float,
    is_stopped: Callable[[], bool],
) -> None:
    """Return when a server and its models are ready; raises StartError when that fails, or is no longer wanted.

    limit_s: how long it may take from `began_s` on, of time.monotonic().
    """
    end_s = began_s + limit_s
    waiting = ["the server", *models]
    while waiting:
        if is_stopped():
            raise StartError("stopped before the server was ready")
        if (status := server.poll()) is not None:
            kind = AbortedStart if status == -signal.SIGABRT else StartError
            raise kind(f"the server did not start: {log.cause(log_path.read_text(errors='replace'))}")
        if time.monotonic() > end_s:
            raise StartError(f"not ready after {limit_s:g} s (READY_LIMIT_S): {', '.join(waiting)}")
        if admin.is_ready("" if waiting[0] == "the server" else waiting[0]):
            waiting.pop(0)
        else:
            time.sleep(_POLL_S)
