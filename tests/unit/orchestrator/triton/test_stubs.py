"""A model's process is found by its script and told from its heir by its age; real processes, no Triton."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.triton.stubs import Stubs, now_s

LIMIT_S = 20.0


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


def until(condition: Any) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def seen(stubs: Stubs, model: str) -> bool:
    """Whether a process that is just starting shows by now."""
    stubs.is_gone(model, now_s())
    return stubs.note(model)


def test_a_process_is_gone_once_it_is_dead_though_nobody_has_waited_for_it(start: Any) -> None:
    stubs = Stubs()
    target = start("target")
    until(lambda: seen(stubs, "target"))
    called_s = now_s()
    assert not stubs.is_gone("target", called_s)
    target.kill()
    until(lambda: stubs.is_gone("target", called_s))
    assert target.returncode is None, "a zombie is what Triton leaves of its stubs"


def test_an_heir_does_not_know_the_calls_of_the_dead(start: Any) -> None:
    stubs = Stubs()
    first = start("target")
    until(lambda: seen(stubs, "target"))
    called_s = now_s()
    first.kill()
    until(lambda: stubs.is_gone("target", called_s))
    time.sleep(0.05)  # a start is known to a tick of 10 ms
    start("target")
    until(lambda: not stubs.is_gone("target", now_s()))
    assert stubs.is_gone("target", called_s)


def test_a_process_that_was_never_seen_is_not_gone(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is that of another server: where processes cannot be told apart, calls are waited for."""
    stubs = Stubs()
    start("target")
    monkeypatch.setattr("os.getppid", lambda: 1)
    stubs.note("target")
    assert not stubs.is_gone("target", now_s())


def test_models_are_told_apart(start: Any) -> None:
    stubs = Stubs()
    draft = start("draft")
    start("target")
    until(lambda: seen(stubs, "target") and seen(stubs, "draft"))
    draft.kill()
    until(lambda: stubs.is_gone("draft", now_s()))
    assert not stubs.is_gone("target", now_s())
