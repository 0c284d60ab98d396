"""What passes cost at load."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from runtime.engine import profile
from runtime.engine.profile import NUM_ROWS, measured_costs
from tests.support.engines import make_paged
from tests.support.tiny_models import make_tiny_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("models") / "target", max_position_embeddings=1024)


def test_passes_of_all_sizes_are_measured_and_leave_nothing_behind(folder: Path) -> None:
    paged = make_paged(folder)
    curve = measured_costs(paged)
    assert curve and curve.rows.tolist() == [*NUM_ROWS]
    assert curve.seconds[0] > 0.0 and np.all(np.diff(curve.seconds) >= 0.0)
    assert not len(paged.sequences)


def test_a_slow_machine_is_measured_with_few_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a second for each row of a pass, by a clock that this test moves."""
    paged, now_s = make_paged(folder), 0.0
    forward = paged.forward

    def slow(segments: list[profile.Segment]) -> object:
        nonlocal now_s
        now_s += 0.05 * (segments[0].tree.num_nodes + 1)
        return forward(segments)

    monkeypatch.setattr(paged, "forward", slow)
    monkeypatch.setattr(profile.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(profile.time, "perf_counter", lambda: now_s)
    curve = measured_costs(paged)
    assert curve
    assert curve.rows.tolist() == [1, 2, 3, 4]
    assert curve.seconds.tolist() == pytest.approx([0.05, 0.1, 0.15, 0.2])


def test_a_cache_without_room_is_not_measured(folder: Path) -> None:
    paged = make_paged(folder)
    paged.sequences.pool.allocate(paged.sequences.pool.num_available - 2, None)
    assert measured_costs(paged) is None
    assert not len(paged.sequences)
