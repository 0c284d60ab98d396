"""A model's process is found by its script; real processes, no Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.core.deployment import stubs as module
from orchestrator.core.deployment.stubs import Stubs, is_alive, living_stubs
from tests.support.hanging import until


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Starts processes that look like stubs; they are children of this one, as stubs are siblings of a stub."""
    ours = os.getpid()
    monkeypatch.setattr("os.getppid", lambda: ours)
    started: list[subprocess.Popen[bytes]] = []

    def begin(model: str) -> subprocess.Popen[bytes]:
        script = tmp_path / model / "1" / "model.py"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text("import time; time.sleep(600)")
        started.append(subprocess.Popen([sys.executable, str(script)]))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> Stubs:
    """A Stubs that looks anew each time that it is asked."""
    monkeypatch.setattr(module, "ALIVE_S", 0.0)
    monkeypatch.setattr(module, "ABSENT_S", 0.0)
    return Stubs()


def found(stubs: Stubs, model: str) -> psutil.Process:
    """Wait until a process that is just starting is found alive."""
    until(lambda: (process := stubs.process_of(model)) and is_alive(process))
    process = stubs.process_of(model)
    assert process
    return process


def test_a_zombie_process_counts_as_dead(start: Any, stubs: Stubs) -> None:
    target = start("target")
    process = found(stubs, "target")
    assert process.pid == target.pid
    target.kill()
    until(lambda: not is_alive(process))
    assert target.returncode is None, "Triton leaves its stubs as zombies"
    assert stubs.process_of("target") == process, "while there is no other process, calls go to the dead one"


def test_a_new_process_takes_the_calls_that_come_after_its_start(start: Any, stubs: Stubs) -> None:
    first = start("target")
    before = found(stubs, "target")
    first.kill()
    until(lambda: not is_alive(before))
    second = start("target")
    after = found(stubs, "target")
    assert after.pid == second.pid and is_alive(after) and not is_alive(before)


def test_processes_of_another_server_are_not_found(start: Any, stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where processes cannot be told apart, calls are waited for."""
    start("target")
    monkeypatch.setattr("os.getppid", lambda: 1)
    assert stubs.process_of("target") is None


def test_a_server_that_has_ended_has_no_processes() -> None:
    """It may end between two looks: an exception used to leave a reload without an answer."""
    assert living_stubs(2**22 + 1) == {}


def test_models_are_told_apart(start: Any, stubs: Stubs) -> None:
    draft = start("draft")
    start("target")
    processes = {model: found(stubs, model) for model in ("target", "draft")}
    draft.kill()
    until(lambda: not is_alive(processes["draft"]))
    assert is_alive(processes["target"])


def test_a_process_that_lives_is_not_looked_at_for_every_call(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stubs = Stubs()
    start("target")
    monkeypatch.setattr(module, "ABSENT_S", 0.0)
    process = found(stubs, "target")
    monkeypatch.setattr(module, "ALIVE_S", 1e9)
    stubs._look_again_s.clear()
    stubs.process_of("target")
    monkeypatch.setattr(module, "is_alive", lambda process: pytest.fail("it was looked at"))
    assert stubs.process_of("target") == process
