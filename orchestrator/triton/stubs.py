"""The processes of the server's other Python models: is the process that took a call still alive?"""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

#: How long a process that was seen alive is taken to be alive, and how long one that was not found is not searched for.
ALIVE_S, ABSENT_S = 0.25, 5.0


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs. Triton does not reap its stubs, so a dead one may be a zombie."""
    try:
        return bool(process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))
    except psutil.Error:
        return False


class Stubs:
    """Finds the process of each Triton model among the children of the server, which is our own parent.

    Triton calls the process of a Python model a stub; its first argument is the path <model>/<version>/model.py.
    """

    def __init__(self) -> None:
        self._last_seen: dict[str, psutil.Process] = {}
        self._look_again_s: dict[str, float] = {}

    def process_of(self, model: str) -> psutil.Process | None:
        """Return the process that takes a model's calls now, its last one if that is dead, None if none was seen."""
        now_s = time.monotonic()
        if now_s >= self._look_again_s.get(model, 0.0):
            known = self._last_seen.get(model)
            if known is None or not is_alive(known):
                self._search(model)
            self._look_again_s[model] = now_s + (ALIVE_S if model in self._last_seen else ABSENT_S)
        return self._last_seen.get(model)

    def _search(self, model: str) -> None:
        for process in psutil.Process(os.getppid()).children():
            try:
                path = Path((process.cmdline() + ["", ""])[1])
            except psutil.Error:
                continue
            if path.name == "model.py" and path.parts[-3:-2] == (model,) and is_alive(process):
                self._last_seen[model] = process
