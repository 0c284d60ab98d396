"""Admissions, each in a folder of its own unless a test gives it one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.core.deployment.slots import NO_LIMITS, TenantLimits
from orchestrator.server.admission import Admission
from tests.support.hanging import WAIT_S


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Admission]]:
    made: list[Admission] = []

    def _make(max_running: int, max_waiting: int, limits: TenantLimits = NO_LIMITS) -> Admission:
        made.append(Admission(max_running, max_waiting, tmp_path / str(len(made)), limits))
        return made[-1]

    yield _make
    for admission in made:
        assert admission.close(WAIT_S)
