"""A watchdog over a server's processes, without a server."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import watchdog as module
from launcher.triton_process import StartError
from launcher.watchdog import ProcessWatchdog
from orchestrator.core.deployment.drain_state import Drain, DrainAsker


class ScriptedTriton:
    """Ends as told, and notes how often it is started again."""

    def __init__(self) -> None:
        self.ended: str | None = None
        self.is_fragile, self.num_starts = False, 0
        self.error: StartError | None = None

    @property
    def pid(self) -> int | None:
        return None if self.ended else os.getpid()

    @property
    def is_killed(self) -> bool:
        return "by signal" in (self.ended or "")

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


class ScriptedProbe:
    """Gets tokens, or not, as told."""

    def __init__(self) -> None:
        self.whys: Iterator[str | None] = itertools.repeat(None)
        self.num_asked = 0

    def why_no_token(self) -> str | None:
        self.num_asked += 1
        return next(self.whys)


class Watched:
    """A watchdog over the model `target`, which has no process, and all that it sees and says."""

    def __init__(self, folder: Path) -> None:
        self.triton, self.admin, self.probe = ScriptedTriton(), ScriptedAdmin(), ScriptedProbe()
        self.drain = Drain(folder, DrainAsker.RESTART)
        self.lines: list[str] = []
        self.dog = ProcessWatchdog(
            self.triton,  # type: ignore[arg-type]
            ["target"],
            self.admin,  # type: ignore[arg-type]
            self.probe,  # type: ignore[arg-type]
            self.drain,
            say=self.lines.append,
            load_limit_s=1,
            stop_limit_s=1,
            probe_period_s=0.01,
        )

    def without_models(self) -> Watched:
        """Let it watch Triton alone, which has no models."""
        self.dog._python_models = set()
        return self


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Watched]:
    for name in ("_POLL_S", "_RETRY_S"):
        monkeypatch.setattr(module, name, 0.01)
    made = Watched(tmp_path)
    yield made
    made.dog.end()
    if made.dog.ident:  # it was started
        made.dog.join(10)
