"""Reloading: compares a running deployment with its file and the files named there, and applies what has changed."""

from __future__ import annotations

import contextlib
import stat
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from orchestrator.core.deployment.config import FOLDERS, ServingConfig
from orchestrator.core.deployment.reload_requests import COMMITS, Phase, Reload, live_keys
from orchestrator.core.errors import ConfigError, ServingError, abbreviated
from orchestrator.core.methods import DRAFTERS

#: The files of a folder, in order: path below it, size and time of the last change in nanoseconds.
Files = tuple[tuple[str, int, int], ...]
Stamps = dict[str, Files]


class Reloader:
    """Makes the processes of a running server apply new settings, one reload at a time.

    config: the settings that the processes have now. load: reads the deployment file again; raises ConfigError.
    folder: the folder that the processes share. limit_s: how long a phase may take.
    """

    def __init__(self, config: ServingConfig, load: Callable[[], ServingConfig], folder: Path, limit_s: float) -> None:
        self.config = config
        self._load, self._folder, self._limit_s = load, folder, limit_s
        self._stamps, self._number = stamps_of(config), 0
        self._lock = threading.Lock()

    def reload(self, processes: Mapping[int, str], restart: Callable[[int], None]) -> str:
        """Apply what has changed; return it in words.

        processes: {process id: model} of the server's models. restart: has a process, given by its id, replaced by
        another, which reads the file as it then is.
        Raises ServingError if the file is refused or a process cannot prepare it; then nothing has changed. A process
        that has prepared it but does not apply it is restarted.
        """
        with self._lock:
            before, after = self.config, self._load()
            stamps = stamps_of(after)
            changed = changed_keys(before, after, self._stamps, stamps)
            if not changed:
                return "reload: nothing has changed"
            self._number += 1
            reload = Reload(self._folder, self._number, after, changed)
            engines = (
                {*DRAFTERS} if before.is_colocated else {"target", *DRAFTERS}
            )  # these read nothing that can change
            asked = {pid: model for pid, model in processes.items() if model not in engines}
            if failed := reload.ask(Phase.PREPARE, asked, self._limit_s):
                reload.abort()
                raise ServingError(next(iter(failed.values())))
            failed = self._commit(reload, asked, restart)
            self.config, self._stamps = after, stamps
            restarted = f"; restarted to apply it: {', '.join(failed.values())}" if failed else ""
            return f"reload: {described(before, after, changed)}{restarted}"

    def _commit(self, reload: Reload, processes: Mapping[int, str], restart: Callable[[int], None]) -> dict[int, str]:
        """Make the processes apply what they have prepared; restart those that do not, and return why each did not.

        Some have applied it by then, which cannot be undone: the only way to equal settings is forward.
        """
        failed: dict[int, str] = {}
        for phase in COMMITS:
            rest = {pid: model for pid, model in processes.items() if pid not in failed}
            late = reload.ask(phase, rest, self._limit_s)
            for pid in late:  # an engine at once: the public models are about to call it with the new settings
                restart(pid)
            failed |= late
        return failed


def stamps_of(config: ServingConfig) -> Stamps:
    """Return the files of each key that may name a folder; an empty tuple for hub ids and empty keys."""
    return {key: _files(Path(getattr(config, key))) if getattr(config, key) else () for key in FOLDERS}


def _files(folder: Path) -> Files:
    """Return all files below a folder; an empty tuple if there is no such folder."""
    found = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # removed since it was listed, or a link to nothing
            if stat.S_ISREG((status := path.stat()).st_mode):
                found.append((str(path.relative_to(folder)), status.st_size, status.st_mtime_ns))
    return tuple(sorted(found))


def changed_keys(before: ServingConfig, after: ServingConfig, old: Stamps, new: Stamps) -> list[str]:
    """Return the keys whose value has changed, or the files in the folder that it names.

    Raises ConfigError for a key that a running server cannot change.
    """
    changed = [key for key in ServingConfig.model_fields if getattr(before, key) != getattr(after, key)]
    changed += [key for key in FOLDERS if key not in changed and old[key] != new[key]]
    allowed = live_keys(before)
    if fixed := [key for key in changed if key not in allowed]:
        raise ConfigError(
            f"{described(before, after, fixed[:1])}: {fixed[0]} cannot be changed while the server runs; restart the "
            f"replicas one after another (a rolling restart; a reload may change {', '.join(allowed)})"
        )
    return changed


def described(before: ServingConfig, after: ServingConfig, changed: Iterable[str]) -> str:
    """Return in words what has changed."""
    words = []
    for key in changed:
        old, new = getattr(before, key), getattr(after, key)
        words.append(f"{key} {abbreviated(old)} -> {abbreviated(new)}" if old != new else f"{key} (its files)")
    return ", ".join(words)
