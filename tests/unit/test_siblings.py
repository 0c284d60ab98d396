"""Calls that never return are left behind, and a model's process is found by its age; real processes, no Triton."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import EngineLost
from orchestrator.triton import siblings

LIMIT_S = 20.0


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Starts processes that look like stubs; they are children of this one, as stubs are siblings of a stub."""
    ours = os.getpid()
    monkeypatch.setattr(siblings, "_last_seen", {})
    monkeypatch.setattr("os.getppid", lambda: ours)
    started: list[subprocess.Popen[bytes]] = []

    def start(model: str) -> subprocess.Popen[bytes]:
        script = tmp_path / model / "1" / "model.py"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text("import time; time.sleep(600)")
        started.append(subprocess.Popen([sys.executable, str(script)]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def until(condition: Any) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def seen(model: str) -> bool:
    siblings.note(model)
    siblings.is_gone(model, siblings.now_s())
    return bool(siblings._last_seen[model])


def test_a_process_is_gone_once_it_is_dead_though_nobody_has_waited_for_it(stubs: Any) -> None:
    target = stubs("target")
    until(lambda: seen("target"))
    called_s = siblings.now_s()
    assert not siblings.is_gone("target", called_s)
    target.kill()
    until(lambda: siblings.is_gone("target", called_s))
    assert target.returncode is None, "a zombie is what Triton leaves of its stubs"


def test_an_heir_does_not_know_the_calls_of_the_dead(stubs: Any) -> None:
    first = stubs("target")
    until(lambda: seen("target"))
    called_s = siblings.now_s()
    first.kill()
    until(lambda: siblings.is_gone("target", called_s))
    time.sleep(0.05)  # a start is known to a tick of 10 ms
    stubs("target")
    until(lambda: not siblings.is_gone("target", siblings.now_s()))
    assert siblings.is_gone("target", called_s)


def test_a_process_that_was_never_seen_is_not_gone(stubs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is that of another server: where processes cannot be told apart, calls are waited for."""
    stubs("target")
    monkeypatch.setattr("os.getppid", lambda: 1)
    siblings.note("target")
    assert not siblings.is_gone("target", siblings.now_s())


def test_models_are_told_apart(stubs: Any) -> None:
    draft = stubs("draft")
    stubs("target")
    until(lambda: seen("target") and seen("draft"))
    draft.kill()
    until(lambda: siblings.is_gone("draft", siblings.now_s()))
    assert not siblings.is_gone("target", siblings.now_s())


def test_a_call_s_result_and_its_error_come_back() -> None:
    callers: siblings.Callers[int] = siblings.Callers()

    def fails() -> int:
        raise RuntimeError("boom")

    for _ in range(3):
        assert callers.run(lambda: 7, is_lost=lambda: True) == 7
        with pytest.raises(RuntimeError, match="boom"):
            callers.run(fails, is_lost=lambda: True)


def test_calls_run_beside_each_other_and_threads_are_used_again() -> None:
    callers: siblings.Callers[bool] = siblings.Callers()
    together = threading.Barrier(3)
    seen: set[int] = set()

    def meet() -> bool:
        seen.add(threading.get_ident())
        together.wait(LIMIT_S)
        return True

    for _ in range(4):
        threads = [threading.Thread(target=callers.run, args=(meet, lambda: False)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()
    assert len(seen) == 3


def test_a_slow_call_is_waited_for_and_a_lost_one_left_behind() -> None:
    callers: siblings.Callers[int] = siblings.Callers()
    polls: list[int] = []
    gate = threading.Event()

    def slow() -> int:
        assert gate.wait(LIMIT_S)
        return 1

    def not_lost() -> bool:
        polls.append(1)
        if len(polls) == 3:
            gate.set()
        return False

    assert callers.run(slow, not_lost, poll_s=0.01) == 1
    gate.clear()
    with pytest.raises(EngineLost):
        callers.run(slow, lambda: True, poll_s=0.01)
    # The thread that was left behind answers nobody else, even when its call returns after all.
    gate.set()
    assert [callers.run(lambda n=n: n, lambda: False) for n in range(5)] == list(range(5))
