"""A watch over a server's processes, without a server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from launcher import watch as module
from launcher.triton_process import StartError
from launcher.watch import Watch
from launcher.wear import Wear


class ScriptedTriton:
    """Ends as told, and notes how often it is started again."""

    def __init__(self) -> None:
        self.ended: str | None = None
        self.is_killed, self.is_fragile, self.num_starts = True, False, 0
        self.error: StartError | None = None

    @property
    def pid(self) -> int | None:
        return None if self.ended else os.getpid()

    def why_ended(self) -> str | None:
        return self.ended

    def start(self) -> None:
        self.num_starts += 1
        if self.error:
            raise self.error
        self.ended = self.ended if self.is_fragile else None

    def kill(self) -> None:
        self.ended = "the server ended by signal 9: it was killed"


class ScriptedAdmin:
    """Notes what is reloaded, and fails as told."""

    def __init__(self) -> None:
        self.reloaded: list[str] = []
        self.error: Exception | None = None
        self.answers = True

    def is_live(self) -> bool:
        return self.answers

    def reload(self, model: str, limit_s: float) -> None:
        self.reloaded.append(model)
        if self.error:
            raise self.error


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[Watch, ScriptedAdmin, list[str]]]:
    """A watch over the model `target`, which has no process."""
    monkeypatch.setattr(module, "_POLL_S", 0.01)
    admin, lines = ScriptedAdmin(), list[str]()
    watch = Watch(
        ScriptedTriton(),  # type: ignore[arg-type]
        ["target"],
        admin,  # type: ignore[arg-type]
        say=lines.append,
        load_limit_s=1,
        heartbeats=tmp_path,
        hang_limit_s=0.2,
        wear=Wear(tmp_path, 10.0, lambda: False, lines.append),
    )
    yield watch, admin, lines
    watch.end()
    watch.join(10)


BEATING = """
import pathlib, sys, time
from orchestrator.core.deployment.heartbeat import Heartbeat
heartbeat = Heartbeat(pathlib.Path(sys.argv[1]))
while True:
    heartbeat.beat()
    print(flush=True)
    time.sleep(0.01)
"""


@pytest.fixture
def beating(tmp_path: Path) -> Iterator[psutil.Process]:
    """A process that beats."""
    command = [sys.executable, "-c", BEATING, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline()
        yield psutil.Process(process.pid)
        process.kill()


@pytest.fixture
def serving(watched: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Watch, ScriptedTriton]:
    """A watch over a Triton without models."""
    watch, _, _ = watched
    watch._python_models = set()
    monkeypatch.setattr(module, "_RETRY_S", 0.01)
    return watch, watch._triton
