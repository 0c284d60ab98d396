"""A server's private folder, whose name is also the prefix of its shared-memory regions; both vanish with the server.

A launcher that is killed leaves them behind. The next one sweeps them: a lock that nobody holds shows that the owner is
gone, even across process namespaces, where process ids mean nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
import time
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "specserve-"
_FAILED = "specserve-failed-"
_KEEP_FAILED_S = 24 * 3600


class WorkFolder:
    """A locked private folder."""

    def __init__(self) -> None:
        sweep()
        parent = Path(tempfile.gettempdir())
        # Made under a name that no sweep matches, since it would look like an orphan until it is locked.
        fresh = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent))
        self._lock = os.open(fresh / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._keeper = _keep(fresh)
        self.path = fresh.rename(parent / fresh.name.removeprefix("."))

    @property
    def log(self) -> Path:
        """The server's log; it need not exist yet."""
        return self.path / "server.log"

    @property
    def state(self) -> Path:
        """The folder with running slots and the drain, which the processes share; it need not exist yet."""
        return self.path / "state"

    @property
    def aliases(self) -> Path:
        """The model repository of the public model's aliases; it need not exist."""
        return self.path / "aliases"

    @property
    def region_prefix(self) -> str:
        """The beginning of the names of this server's shared-memory regions."""
        return f"{self.path.name}-"

    def regions(self) -> dict[str, int]:
        """Return the server's shared-memory regions and their sizes in bytes."""
        return {path.name: path.stat().st_size for path in _regions(self.path)}

    def remove_regions(self) -> None:
        """Delete what is left of the shared memory."""
        _remove_regions(self.path)

    def remove(self) -> None:
        """Delete the folder and what is left of the shared memory."""
        _remove(self.path)
        self._unlock()

    def keep_log(self) -> Path:
        """Delete everything but the log, and return its new path; it is kept for a day."""
        kept = self.path.with_name(self.path.name.replace(_PREFIX, _FAILED, 1) + ".log")
        with contextlib.suppress(OSError):
            shutil.move(self.log, kept)
        self.remove()
        return kept

    def _unlock(self) -> None:
        for file in filter(lambda file: file >= 0, (self._lock, self._keeper)):
            os.close(file)
        self._lock = self._keeper = -1


def sweep() -> None:
    """Remove what this user's killed launchers have left behind."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another launcher sweeps too, or the folder is another user's
            if path.name.startswith(_FAILED):
                if time.time() - path.stat().st_mtime > _KEEP_FAILED_S:
                    path.unlink()
            elif not path.is_symlink() and path.stat().st_uid == os.getuid() and _is_orphan(path):
                _remove(path)


def _keep(folder: Path) -> int:
    """Lock a folder against systemd-tmpfiles, which removes what is ten days old below others; return the lock.

    Not in XDG_RUNTIME_DIR, which is removed when its user logs out, from under a server that runs on.
    """
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def _is_orphan(path: Path) -> bool:
    lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _remove(path: Path) -> None:
    _remove_regions(path)
    shutil.rmtree(path, ignore_errors=True)


def _remove_regions(path: Path) -> None:
    for region in _regions(path):
        region.unlink(missing_ok=True)


def _regions(path: Path) -> list[Path]:
    return list(SHARED_MEMORY.glob(f"{glob.escape(path.name)}-*"))
