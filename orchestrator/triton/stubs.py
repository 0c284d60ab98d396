"""The processes of the server's other Python models, as Linux shows them: does the one that was called still live?"""

from __future__ import annotations

import os
import time
from pathlib import Path

_PROC = Path("/proc")
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


def now_s() -> float:
    """Return the time on the clock of `Stubs.is_gone`: seconds since the machine's start."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Stubs:
    """The processes last seen, by model; only of one that was seen can be said that it is gone."""

    def __init__(self) -> None:
        self._last_seen: dict[str, Path | None] = {}

    def note(self, model: str) -> bool:
        """Look for a model's process, the first time that it is asked for; returns whether one has been seen."""
        if model not in self._last_seen:
            self._last_seen[model] = None
            self._search(model)
        return self._last_seen[model] is not None

    def is_gone(self, model: str, since_s: float) -> bool:
        """Tell whether the process that a model had at `since_s` has ended; its heir knows nothing of its calls."""
        known = self._last_seen.get(model)
        process = known if known and _is_stub_of(model, known) else self._search(model)
        if process is None:
            return known is not None
        return _started_s(process) > since_s

    def _search(self, model: str) -> Path | None:
        """Go through all processes for a living one of a model, and note it."""
        for process in _PROC.iterdir():
            if process.name.isdigit() and _is_stub_of(model, process):
                self._last_seen[model] = process
                return process
        return None


def _is_stub_of(model: str, process: Path) -> bool:
    """A stub's first argument is the path of its model.py: …/<model>/<version>/model.py; a dead one has none."""
    try:
        arguments = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    path = Path(os.fsdecode(arguments[1])) if len(arguments) > 1 else Path()
    return path.name == "model.py" and path.parts[-3:-2] == (model,) and _stat(process)[1] == str(os.getppid())


def _started_s(process: Path) -> float:
    return float(_stat(process)[19]) * _TICK_S


def _stat(process: Path) -> list[str]:
    """Return the fields of a process behind its name: state, parent, …; of one that is gone, such as never fit."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", *["inf"] * 49]
