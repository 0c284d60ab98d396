"""The heartbeat of a model's process: a number in a file that changes as long as the process works.

An engine beats on the thread that runs its passes, so that a pass that never ends is silence, too; a public model
beats on a thread of its own. The launcher reads the files, which are in the state folder (`launcher/watch.py`).
A process that can no longer work well asks in the same way to be replaced.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

from orchestrator.core.deployment.config import STATE_FOLDER

_PREFIX, _REPLACEMENT_PREFIX = "heartbeat-", "replacement-"
#: Seconds between two beats of a thread that has nothing else to do.
BEAT_S = 0.5


class Heartbeat:
    """The heartbeat of this process; one thread at a time may beat."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(_path(folder, os.getpid()), os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        # An earlier process with the same id may have asked to be replaced.
        _path(folder, os.getpid(), _REPLACEMENT_PREFIX).unlink(missing_ok=True)
        self._count = 0

    @classmethod
    def from_environment(cls) -> Heartbeat | None:
        """Return the heartbeat of a process that a launcher watches, None for any other."""
        folder = os.environ.get(STATE_FOLDER)
        return cls(Path(folder)) if folder else None

    def beat(self) -> None:
        """Show that the calling thread works; a full disk is no reason to stop."""
        self._count += 1
        with contextlib.suppress(OSError):
            os.pwrite(self._file, b"%020d" % self._count, 0)

    def start(self) -> None:
        """Beat from a thread of its own, forever."""

        def run() -> None:
            while True:
                time.sleep(BEAT_S)
                self.beat()

        threading.Thread(target=run, name="heartbeat", daemon=True).start()


def ask_for_replacement(folder: Path) -> None:
    """Ask the launcher to start another process in place of this one, and then to kill this one."""
    _path(folder, os.getpid(), _REPLACEMENT_PREFIX).touch()


def take_replacement_request(folder: Path, process: int) -> bool:
    """Return whether a process has asked to be replaced since the last call."""
    try:
        _path(folder, process, _REPLACEMENT_PREFIX).unlink()
    except FileNotFoundError:
        return False
    return True


def last_beat(folder: Path, process: int) -> bytes | None:
    """Return the last beat of a process, None if there has been none."""
    try:
        return _path(folder, process).read_bytes() or None
    except OSError:
        return None


def _path(folder: Path, process: int, prefix: str = _PREFIX) -> Path:
    return folder / f"{prefix}{process}"
