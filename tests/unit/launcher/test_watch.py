"""The watch over a server's processes, without a server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from launcher import watch as module
from launcher.admin import AdminError
from launcher.watch import Watch
from tests.support.hanging import until


class ScriptedAdmin:
    """Notes what is reloaded, and fails as told."""

    def __init__(self) -> None:
        self.reloaded: list[str] = []
        self.error: Exception | None = None

    def reload(self, model: str, limit_s: float) -> None:
        self.reloaded.append(model)
        if self.error:
            raise self.error


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Watch, ScriptedAdmin, list[str]]]:
    """A watch over the model `target`, which has no process."""
    monkeypatch.setattr(module, "_POLL_S", 0.01)
    admin, lines = ScriptedAdmin(), list[str]()
    watch = Watch(os.getpid(), ["target"], admin, say=lines.append, load_limit_s=1)  # type: ignore[arg-type]
    yield watch, admin, lines
    watch.end()
    watch.join(10)


def test_an_exception_is_counted_and_the_watch_goes_on(watched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to end the thread, and nobody noticed."""
    watch, admin, lines = watched
    admin.error = ValueError("a bug")
    watch.start()
    until(lambda: watch.num_errors >= 2)
    assert "failed 1 times, goes on: ValueError('a bug')" in "\n".join(lines)
    assert watch.is_alive() and watch.failure is None
    admin.error = None
    until(lambda: any("reloaded in" in line for line in lines))


def test_a_model_that_cannot_be_reloaded_ends_the_watch(watched: Any) -> None:
    watch, admin, _ = watched
    admin.error = AdminError("models/target/load: no")
    watch.start()
    watch.join(10)
    assert watch.failure == "model target could not be reloaded: models/target/load: no"
    assert admin.reloaded == ["target"] * 2


def test_a_model_that_keeps_dying_ends_the_watch(watched: Any) -> None:
    watch, admin, _ = watched
    watch.start()
    watch.join(10)
    assert watch.failure == "model target died 5 times within a minute" and admin.reloaded == ["target"] * 4
