"""What passes cost, measured at load."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runtime.engine import profile
from runtime.engine.kv.batch import Segment
from runtime.engine.profile import NUM_ROWS, NUM_TIMED, measured_costs
from tests.support.engines import make_paged
from tests.support.tiny_models import make_tiny_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("models") / "target", max_position_embeddings=1024)


def test_passes_of_all_sizes_are_measured_and_leave_nothing_behind(folder: Path) -> None:
    paged = make_paged(folder)
    costs = measured_costs(paged)
    assert costs and costs.rows.tolist() == [*NUM_ROWS]
    assert costs.seconds[0] > 0.0 and np.all(np.diff(costs.seconds) >= 0.0)
    assert not len(paged.sequences)


def with_row_s(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    row_s: float,
    token_s: float = 0.0,
    row_token_s: float = 0.0,
    first_s: float = 0.0,
) -> Any:
    """Return a model of which each row of a pass takes so long, by a clock that moves by passes alone.

    token_s, row_token_s: of each token of the context, and of each for each row. first_s: paid once.
    """
    paged, now_s = make_paged(folder), 0.0
    forward = paged.forward

    def slow(segments: list[Segment]) -> object:
        nonlocal now_s, first_s
        num_rows = segments[0].last - segments[0].first + segments[0].tree.num_nodes
        now_s += first_s + row_s * num_rows + (token_s + row_token_s * num_rows) * segments[0].last
        first_s = 0.0
        return forward(segments)

    monkeypatch.setattr(paged, "forward", slow)
    clock = SimpleNamespace(monotonic=lambda: now_s, perf_counter=lambda: now_s)
    monkeypatch.setattr(profile, "time", clock)
    return paged


def test_a_slow_machine_is_measured_with_fewer_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = measured_costs(with_row_s(folder, monkeypatch, 0.005))
    assert costs
    assert costs.rows.tolist() == [1, 2, 3, 4, 6, 8]
    assert costs.seconds[:3].tolist() == pytest.approx([0.005, 0.01, 0.015])
    assert (costs.token_s, costs.row_token_s) == (0.0, 0.0)  # no time was left for them


def test_what_the_context_costs_is_measured_apart_from_the_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = measured_costs(with_row_s(folder, monkeypatch, 1e-5, 1e-7, 1e-8))
    assert costs
    assert (costs.token_s, costs.row_token_s) == pytest.approx((1e-7, 1e-8))
    assert costs.seconds.tolist() == pytest.approx([1e-5 * rows for rows in NUM_ROWS])


@pytest.mark.parametrize(("num_rounds", "costs_some"), [(1, True), (2, False)])
def test_contexts_cost_what_they_do_though_a_round_was_held_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch, num_rounds: int, costs_some: bool
) -> None:
    """In two rounds it might be noise. The first passes of a row after the short context are those of the rows."""
    paged, num_passes = with_row_s(folder, monkeypatch, 1e-5, 1e-7, 1e-8), 0
    forward = paged.forward

    def held_up(segments: list[Segment]) -> object:
        nonlocal num_passes
        is_plain = segments[0].first + 1 == segments[0].last == 256 and not segments[0].tree.num_nodes
        num_passes += is_plain
        if is_plain and 2 * NUM_TIMED < num_passes <= (2 + num_rounds) * NUM_TIMED:
            for _ in range(20):
                forward(segments)
        return forward(segments)

    monkeypatch.setattr(paged, "forward", held_up)
    costs = measured_costs(paged)
    assert costs and bool(costs.token_s) is costs_some


def test_a_cache_without_room_for_a_long_context_is_measured_after_a_short_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paged = with_row_s(folder, monkeypatch, 1e-5, 1e-7, 1e-8)
    pool = paged.sequences.pool
    pool.allocate(pool.num_available - (256 + 128) // pool.block_tokens, None)
    costs = measured_costs(paged)
    assert costs and costs.rows.tolist() == [*NUM_ROWS]
    assert (costs.token_s, costs.row_token_s) == (0.0, 0.0)


def test_a_machine_that_cannot_measure_rows_enough_measures_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measured_costs(with_row_s(folder, monkeypatch, 0.006)) is None


def test_a_machine_that_is_slow_with_the_first_tokens_reads_no_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paged = with_row_s(folder, monkeypatch, 0.1)
    assert measured_costs(paged) is None
    assert profile.time.monotonic() == pytest.approx(0.1 * (1 + profile.NUM_FIRST))


def test_a_first_pass_that_takes_long_is_no_sign_of_a_slow_machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = measured_costs(with_row_s(folder, monkeypatch, 1e-5, first_s=1.0))
    assert costs and costs.seconds[0] == pytest.approx(1e-5)


def test_a_lack_of_memory_is_no_reason_not_to_serve(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paged = make_paged(folder)

    def forward(segments: list[Segment]) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(paged, "forward", forward)
    assert measured_costs(paged) is None
    assert not len(paged.sequences)


def test_a_cache_without_room_is_not_measured(folder: Path) -> None:
    paged = make_paged(folder)
    paged.sequences.pool.allocate(paged.sequences.pool.num_available - 2, None)
    assert measured_costs(paged) is None
    assert not len(paged.sequences)


def test_contexts_that_cost_nothing_seem_to_cost_nothing_whatever_the_noise(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paged, rng = with_row_s(folder, monkeypatch, 1e-5), np.random.default_rng(0)
    clock = profile.time
    noisy = SimpleNamespace(monotonic=clock.monotonic, perf_counter=lambda: clock.perf_counter() + 1e-6 * rng.random())
    monkeypatch.setattr(profile, "time", noisy)
    costs = measured_costs(paged)
    assert costs and (costs.token_s, costs.row_token_s) == (0.0, 0.0)


def test_contexts_of_which_layers_see_a_window_are_not_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paged = with_row_s(folder, monkeypatch, 1e-5, 1e-7, 1e-8)
    monkeypatch.setattr(paged.model, "has_windows", True)
    costs = measured_costs(paged)
    assert costs and (costs.token_s, costs.row_token_s) == (0.0, 0.0)
