"""The tritonserver process of a server: starting it until its models are ready, restarting it, ending it."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping

from launcher import log, process
from launcher.admin import Admin
from launcher.command import Launch
from launcher.triton import Triton
from launcher.workfolder import WorkFolder
from orchestrator.core.errors import ServingError

_POLL_S = 0.1
_KILL_AFTER_S = 3.0  # what Triton gets beyond its own exit timeout


class StartError(ServingError):
    """The server did not come up; the message has the cause from its log."""


class AbortedStart(StartError):
    """Triton aborted while it loaded its models."""


class TritonProcess:
    """Owns one tritonserver process at a time, its log and its shared memory; any thread may end it while it starts.

    Args:
        installed: the program.
        work: where its log and its shared memory are.
        admin: asks it whether it is ready.
        ready_limit_s: how long it may take to load its models.
        say: called with each line that the launcher itself prints.
        is_stopped: returns whether a start is no longer wanted.
    """

    def __init__(
        self,
        installed: Triton,
        work: WorkFolder,
        admin: Admin,
        *,
        ready_limit_s: float,
        say: Callable[[str], None],
        is_stopped: Callable[[], bool],
    ) -> None:
        self._installed, self._work, self._admin = installed, work, admin
        self._ready_limit_s, self._say, self._is_stopped = ready_limit_s, say, is_stopped
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._has_ended = False
        self._log_offset = 0

    def configure(self, launch: Launch, environ: Mapping[str, str]) -> None:
        """Set what the next process is started with; environ: the environment of its models."""
        self._command, self._environ = launch.command(self._installed), self._installed.environment(environ)
        self._models, self._exit_limit_s = launch.models, launch.exit_limit_s + _KILL_AFTER_S

    @property
    def is_from_wheel(self) -> bool:
        """True if the program is that of the wheel, not a container's."""
        return self._installed.from_wheel

    @property
    def pid(self) -> int | None:
        """The id of the running process, None if there is none."""
        running = self._process
        return running.pid if running and running.poll() is None else None

    def start(self) -> None:
        """Start a process, replacing the last one, and wait until its models are ready; retry once if Triton aborts.

        Raises:
            StartError: it ended, was not ready in time, or is no longer wanted.
        """
        end_s = time.monotonic() + self._ready_limit_s
        try:
            self._wait_until_ready(self._spawn(), end_s)
        except AbortedStart as error:
            self._say(f"{error}; starting it once more")
            self._wait_until_ready(self._spawn(), end_s)

    @property
    def is_killed(self) -> bool:
        """True if a signal has ended it: its own abort, a crash, or somebody's kill."""
        return self._process is not None and (self._process.poll() or 0) < 0

    def why_ended(self) -> str | None:
        """Return in one line how and why the process ended; None before its start and while it runs."""
        if self._process is None or (status := self._process.poll()) is None:
            return None
        ended = f"by signal {-status}" if status < 0 else f"with status {status}"
        return f"the server ended {ended}: {self._cause()}"

    def kill(self) -> None:
        """Kill the process; `start` may follow."""
        if running := self._process:
            running.kill()
            running.wait()

    def end(self) -> None:
        """End the process for good; a start under way in another thread fails."""
        with self._lock:
            self._has_ended = True
            if self._process:
                process.stop(self._process, self._exit_limit_s)

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._process:
                process.stop(self._process, self._exit_limit_s)
                self._work.remove_regions()
            if self._has_ended:
                raise StartError("stopped before the server was ready")
            self._log_offset = self._work.log.stat().st_size if self._work.log.exists() else 0
            self._process = process.spawn(self._command, self._environ, self._work.log)
            return self._process

    def _wait_until_ready(self, server: subprocess.Popen[bytes], end_s: float) -> None:
        waiting = ["the server", *self._models]
        while waiting:
            if self._is_stopped() or self._has_ended:
                raise StartError("stopped before the server was ready")
            if (status := server.poll()) is not None:
                kind = AbortedStart if status == -signal.SIGABRT else StartError
                raise kind(f"the server did not start: {self._cause()}")
            if time.monotonic() > end_s:
                raise StartError(
                    f"not ready after {self._ready_limit_s:g} s (SPECSERVE_READY_LIMIT_S): {', '.join(waiting)}"
                )
            if self._admin.is_ready("" if waiting[0] == "the server" else waiting[0]):
                waiting.pop(0)
            else:
                time.sleep(_POLL_S)

    def _cause(self) -> str:
        """Return in one line what this process has logged about its end."""
        try:
            written = self._work.log.read_bytes()
        except FileNotFoundError:
            written = b""
        since = written[self._log_offset :] if self._log_offset <= len(written) else written  # it may have been emptied
        return log.cause(since.decode(errors="replace"))
