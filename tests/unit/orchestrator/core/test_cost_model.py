"""Curves through measured costs, and the least slopes of costs."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.core.cost_model import UNKNOWN_ROW, Curve, corrected, least_slopes, line_through, rising


def test_least_slopes_are_those_of_all_later_values() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        values = np.cumsum(rng.random(12))
        least = [min((values[m] - values[n]) / (m - n) for m in range(n + 1, 12)) for n in range(11)]
        assert least_slopes(values) == pytest.approx([*least, float("inf")])


def test_a_size_that_was_slow_and_is_worth_little_costs_what_larger_ones_do() -> None:
    assert rising(np.array([8.0, 6.0, 9.0]), np.array([0.5, 20.0, 1.0])).tolist() == pytest.approx(
        [6.05, 6.05, 9.0], abs=0.01
    )
    assert rising(np.array([8.0, 6.0]), np.zeros(2)).tolist() == [7.0, 7.0]


def test_a_curve_is_interpolated_and_goes_on_as_it_rose_on_average() -> None:
    curve = Curve.measured([1, 2, 9], [1.0, 2.0, 5.0])
    assert curve.at(np.array([1.0, 1.5, 9.0, 11.0])).tolist() == pytest.approx([1.0, 1.5, 5.0, 6.0])


def test_a_measured_curve_never_falls() -> None:
    curve = Curve.measured([1, 2, 4], [2.0, 1.0, 3.0])
    assert curve.seconds.tolist() == [1.5, 1.5, 3.0]


def test_rows_beyond_those_measured_are_never_free() -> None:
    curve = Curve.measured([1, 128], [2.0, 1.9])
    assert curve.at(np.array([228.0]))[0] > curve.at(np.array([128.0]))[0]


def test_a_line_passes_through_measurements_that_lie_on_one() -> None:
    rows = np.array([1.0, 5.0, 20.0])
    line = line_through(rows, 0.9 + 0.1 * rows, np.full(3, 1000.0))
    assert line.seconds.tolist() == pytest.approx([1.0, 1.4, 2.9], rel=0.01)


def test_a_line_through_old_measurements_is_nearly_flat() -> None:
    """So what was dear long ago is tried again."""
    rows = np.array([1.0, 5.0])
    line = line_through(rows, np.array([1.0, 9.0]), np.array([20.0, 1e-9]))
    assert line.seconds[1] - line.seconds[0] < 8 * UNKNOWN_ROW


def test_a_line_never_costs_nothing() -> None:
    rows = np.array([1.0, 2.0, 3.0])
    assert line_through(rows, np.array([0.01, 5.0, 20.0]), np.full(3, 20.0)).seconds.min() > 0.0


def test_a_corrected_curve_keeps_its_stairs_between_the_measurements() -> None:
    """Measured: 6 and 12 rows, both a half dearer than at load, where 9 rows took twice the time of 8."""
    stairs = Curve.measured([1, 8, 9, 16], [1.0, 1.0, 2.0, 2.0])
    curve = corrected(stairs, np.array([6.0, 12.0]), np.array([1.5, 3.0]), np.full(2, 1e9), 20.0)
    assert curve.at(np.array([8.0, 9.0])).tolist() == pytest.approx([1.5, 3.0])


def test_a_curve_is_drawn_towards_measurements_by_what_these_are_worth() -> None:
    flat = Curve.measured([1, 9], [1.0, 1.0])
    assert corrected(flat, np.array([4.0]), np.array([2.0]), np.array([20.0]), 20.0).at(
        np.array([4.0])
    ) == pytest.approx([1.5])
