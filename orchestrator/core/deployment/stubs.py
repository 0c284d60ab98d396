"""The processes of a server's Python models: which one takes a model's calls, and whether it is alive."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

#: How long a process that was seen alive counts as alive, and how long a missing one is not searched for again.
ALIVE_S, ABSENT_S = 0.25, 5.0


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs. Triton does not reap its stubs, so a dead one may be a zombie."""
    try:
        return bool(process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))
    except psutil.Error:
        return False


def living_stubs(server: int) -> dict[psutil.Process, str]:
    """Return {process: model} of the living children of a server that run a model; none if the server has ended.

    Triton calls such a process a stub; its first argument is the path …/<model>/<version>/model.py.
    """
    found: dict[psutil.Process, str] = {}
    try:
        children = psutil.Process(server).children()
    except psutil.NoSuchProcess:
        return found
    for process in children:
        try:
            path = Path((process.cmdline() + ["", ""])[1])
        except psutil.Error:
            continue
        if path.name == "model.py" and len(path.parts) > 2 and is_alive(process):
            found[process] = path.parts[-3]
    return found


class Stubs:
    """Finds the processes of the other models, from within the process of one: their parent is the same server."""

    def __init__(self) -> None:
        self._last_seen: dict[str, psutil.Process] = {}
        self._look_again_s: dict[str, float] = {}

    def process_of(self, model: str) -> psutil.Process | None:
        """Return the process that takes a model's calls now, or its last one if that is dead; None if none was seen."""
        now_s = time.monotonic()
        if now_s >= self._look_again_s.get(model, 0.0):
            known = self._last_seen.get(model)
            if known is None or not is_alive(known):
                self._last_seen |= {name: process for process, name in living_stubs(os.getppid()).items()}
            self._look_again_s[model] = now_s + (ALIVE_S if model in self._last_seen else ABSENT_S)
        return self._last_seen.get(model)
