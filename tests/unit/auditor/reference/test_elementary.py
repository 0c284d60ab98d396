"""log, exp and sums: near the truth everywhere, and the bits that docs/wire.md states."""

from __future__ import annotations

from collections.abc import Callable

import mpmath
import numpy as np
import pytest

from auditor.reference.elementary import exp, log, running_total
from orchestrator.core.arrays import FloatArray, total

RNG = np.random.default_rng(83)
NUM_POINTS = 1_000_000

#: docs/wire.md, Arithmetic: argument → result.
LOGS = {
    2.0: "0x1.62e42fefa39efp-1",
    0.1: "-0x1.26bb1bbb55515p+1",
    1.0 - 2.0**-53: "-0x1.0000000000000p-53",
    5e-324: "-0x1.74385446d71c3p+9",
}
EXPS = {-1.0: "0x1.78b56362cef38p-2", -0.1: "0x1.cf46d99d52b3ap-1", -700.0: "0x1.14f2b0fb9307fp-1010"}


def ulps(found: FloatArray, truth: np.ndarray) -> float:
    """The largest distance in units of the last place; truth: extended precision."""
    return float(np.max(np.abs(found - truth) / np.spacing(np.abs(truth.astype(np.float64)))))


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 60, reason="no extended precision")
@pytest.mark.parametrize(
    ("function", "truth", "points"),
    [
        (log, np.log, RNG.random(NUM_POINTS) + 2.0**-60),
        (log, np.log, np.exp(RNG.normal(0.0, 100.0, NUM_POINTS))),
        (log, np.log, 1.0 + RNG.normal(0.0, 1e-4, NUM_POINTS)),
        (exp, np.exp, -RNG.random(NUM_POINTS) * 708.0),
        (exp, np.exp, -RNG.exponential(3.0, NUM_POINTS)),
    ],
)
def test_log_and_exp_are_within_an_ulp(
    function: Callable[[FloatArray], FloatArray], truth: Callable[[np.ndarray], np.ndarray], points: FloatArray
) -> None:
    assert ulps(function(points), truth(points.astype(np.longdouble))) <= 1.0


EDGES = [
    5e-324, 2.0**-1074 * 12345, 2.0**-1022, np.nextafter(2.0**-1022, 0.0), 2.0**-53, np.sqrt(0.5), np.nextafter(np.sqrt(0.5), 1.0),
    np.nextafter(1.0, 0.0), np.nextafter(1.0, 2.0), np.sqrt(2.0), np.nextafter(np.sqrt(2.0), 0.0), np.finfo(np.float64).max,
]  # fmt: skip


@pytest.mark.parametrize("x", EDGES)
def test_log_at_the_edges(x: float) -> None:
    with mpmath.workprec(120):
        truth = mpmath.log(mpmath.mpf(x))
        assert abs(mpmath.mpf(float(log(x))) - truth) <= np.spacing(abs(float(truth)))


def test_the_stated_bits() -> None:
    assert {x: float(log(x)).hex() for x in LOGS} == LOGS
    assert {x: float(exp(x)).hex() for x in EXPS} == EXPS


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 100, 4097])
def test_sums_add_the_upper_half_to_the_lower(length: int) -> None:
    x = RNG.random((3, length)) * 10.0 ** RNG.integers(-9, 9, (3, length))

    def halved(numbers: list[float]) -> float:
        if len(numbers) == 1:
            return numbers[0]
        half = len(numbers) // 2
        return halved([a + b for a, b in zip(numbers[:half], numbers[half:], strict=True)])

    padded = np.zeros((3, 1 << (length - 1).bit_length()))
    padded[:, :length] = x
    assert total(x)[:, 0].tolist() == [halved(row) for row in padded.tolist()]
    assert total(np.concatenate([x, np.zeros((3, 77))], axis=-1)).tolist() == total(x).tolist()


@pytest.mark.parametrize("length", [1, 2, 3, 8, 9, 257])
def test_running_sums_do_not_depend_on_what_follows(length: int) -> None:
    x = RNG.random((2, 400))
    whole = running_total(x)
    assert running_total(x[:, :length]).tolist() == whole[:, :length].tolist()
    assert np.abs(whole - x.cumsum(axis=-1)).max() < 1e-12
    assert whole[:, 2].tolist() == [(c + b) + a for a, b, c, *_ in x.tolist()]
