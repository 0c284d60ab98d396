"""Load of ten times the capacity, at CI size: each request is served or refused, and no text changes.

The full size, with times: `python -m tests.overload`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import Server
from tests.overload import DOORS, overload
from tests.server.conftest import deployment, link, serving

pytestmark = [pytest.mark.server, pytest.mark.long]

MAX_RUNNING, MAX_WAITING, AT_ONCE = 2, 4, 40


@pytest.fixture(scope="module")
def small(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = link(checkpoints, tmp_path_factory.mktemp("overload"))
    limits = (f"max_running = {MAX_RUNNING}", f"max_waiting = {MAX_WAITING}", 'default_speculation = "none"')
    with serving(deployment(folder, *limits)) as server:
        yield server


@pytest.mark.parametrize("door", DOORS)
def test_more_than_fits_is_refused_and_the_rest_served(small: Server, door: str) -> None:
    result = asyncio.run(overload(small, door, MAX_RUNNING + MAX_WAITING, 1.5, 120, AT_ONCE, 10))
    print(result.page())

    assert not result.faults
    for name in ("overload", f"{AT_ONCE} at once"):
        times = result.by_name[name].times
        assert times["ended"] and times["refused"]
    assert sum(map(len, result.by_name[f"{AT_ONCE} at once"].times.values())) == AT_ONCE
