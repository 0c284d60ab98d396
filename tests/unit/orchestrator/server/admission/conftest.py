"""An admission with slots of its own, and one that shares them with other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.server.admission import Admission
from tests.support.hanging import WAIT_S


@pytest.fixture(params=["own slots", "shared slots"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[int, int], Admission]]:
    made: list[Admission] = []

    def _make(max_running: int, max_waiting: int) -> Admission:
        folder = tmp_path / "slots" if request.param == "shared slots" else None
        made.append(Admission(max_running, max_waiting, folder))
        return made[-1]

    yield _make
    for admission in made:
        assert admission.close(WAIT_S)
