"""log, exp and sums made of float64 +, −, ×, ÷ and integer operations alone: the same bits on every machine.

Library functions differ in the last bit between processors, which can change an argmax over noise.
The definition is docs/wire.md, Arithmetic; C++: `native/sampling/elementary.h`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from orchestrator.core.arrays import FloatArray

#: ln 2 = LN2_HIGH + LN2_LOW; the product of LN2_HIGH and an integer below 2²⁰ is exact.
LN2_HIGH, LN2_LOW = float.fromhex("0x1.62e42fefp-1"), float.fromhex("0x1.473de6af278edp-34")
LOG2_E = float.fromhex("0x1.71547652b82fep+0")
#: Minimax coefficients of (2·artanh(s)/s − 2)/s² in s², |s| ≤ 3 − 2√2, the lowest power first; error below 3e-18.
LOG_COEFFICIENTS = tuple(map(float.fromhex, (
    "0x1.555555555558fp-1", "0x1.9999999980d53p-2", "0x1.2492494137eeap-2", "0x1.c71c528cf6fefp-3",
    "0x1.746626a98e09ep-3", "0x1.39a3f6de3c195p-3", "0x1.2ef084b026ab6p-3",
)))  # fmt: skip
#: Minimax coefficients of (exp(r) − 1 − r)/r² in r, |r| ≤ ln(2)/2, the lowest power first; error below 5e-18.
EXP_COEFFICIENTS = tuple(map(float.fromhex, (
    "0x1.000000000000ap-1", "0x1.5555555555560p-3", "0x1.55555555508a2p-5", "0x1.111111110d9dcp-7",
    "0x1.6c16c18420277p-10", "0x1.a01a01b9d6a81p-13", "0x1.a0199a2661c2fp-16", "0x1.71dde1d4ba5f7p-19",
    "0x1.28ad5cde58c7ap-22", "0x1.af82abecadcecp-26",
)))  # fmt: skip

FRACTION_BITS, EXPONENT_BIAS = 52, 1023
FRACTION_MASK = (1 << FRACTION_BITS) - 1
#: The upper bits of √½: `log` splits its argument into 2ᵏ and a fraction from here to twice that.
SQRT_HALF = 0x3FE6A09E00000000
ONE = EXPONENT_BIAS << FRACTION_BITS
#: A subnormal is multiplied by 2⁵⁴ before it is split.
SMALLEST_NORMAL, SUBNORMAL_SHIFT = 2.0**-1022, 54
#: Adding and subtracting it rounds to the nearest integer, ties to even; the sum's lowest bits are that integer.
ROUNDING = 1.5 * 2.0**52
#: Below this, `exp` is 0, so that no subnormal number is ever made.
EXP_LOWEST = -708.0

#: A numpy array or a torch tensor: the functions below use only its operators.
Array: TypeAlias = Any


def polynomial(x: Array, coefficients: Sequence[float]) -> Array:
    """Return the value of a polynomial by Horner's rule; coefficients: the lowest power first."""
    result = x * coefficients[-1] + coefficients[-2]
    for coefficient in coefficients[-3::-1]:
        result = result * x + coefficient
    return result


def log_of_parts(f: Array, k: Array) -> Array:
    """Return log((1 + f)·2ᵏ) for √½ ≤ 1 + f < √2 and an integer k.

    With s = f/(2 + f), log(1 + f) = 2·artanh(s) = f − (f²/2 − s·(f²/2 + R)), R = s²·polynomial(s²).
    """
    s = f / (f + 2.0)
    z = s * s
    half_square = f * f * 0.5
    tail = s * (half_square + z * polynomial(z, LOG_COEFFICIENTS))
    return k * LN2_HIGH - ((half_square - (tail + k * LN2_LOW)) - f)


def exp_of_parts(x: Array, k: Array) -> Array:
    """Return exp(x − k·ln 2), k being the integer nearest to x/ln 2."""
    r = (x - k * LN2_HIGH) - k * LN2_LOW
    return (r + r * r * polynomial(r, EXP_COEFFICIENTS)) + 1.0


def log(x: npt.ArrayLike) -> FloatArray:
    """Return log x, float64, within 1 ulp: −∞ of 0, nan of a negative number."""
    x = np.asarray(x, np.float64)
    is_subnormal = x < SMALLEST_NORMAL
    with np.errstate(over="ignore"):
        normal = np.where(is_subnormal, x * 2.0**SUBNORMAL_SHIFT, x)
    bits = normal.view(np.int64) + (ONE - SQRT_HALF)
    exponents = (bits >> FRACTION_BITS) - EXPONENT_BIAS - SUBNORMAL_SHIFT * is_subnormal
    fractions = ((bits & FRACTION_MASK) + SQRT_HALF).view(np.float64)
    with np.errstate(invalid="ignore"):
        result: FloatArray = log_of_parts(fractions - 1.0, exponents.astype(np.float64))
    special = np.where(x == 0.0, -np.inf, np.where(x > 0.0, x, np.nan))
    return np.where((x > 0.0) & (x < np.inf), result, special)


def exp(x: npt.ArrayLike) -> FloatArray:
    """Return exp x for x ≤ 0, float64, within 1 ulp; 0 below EXP_LOWEST."""
    x = np.asarray(x, np.float64)
    clipped = np.maximum(x, EXP_LOWEST)
    shifted = clipped * LOG2_E + ROUNDING
    scale = (shifted.view(np.int64) + EXPONENT_BIAS << FRACTION_BITS).view(np.float64)
    return np.where(x < EXP_LOWEST, 0.0, exp_of_parts(clipped, shifted - ROUNDING) * scale)


def running_total(x: FloatArray) -> FloatArray:
    """Return the sums of the first 1, 2, 3 … numbers of the last axis.

    For d = 1, 2, 4 … each number has the one d places before it added. No sum depends on the numbers after it.
    """
    distance = 1
    while distance < x.shape[-1]:
        x = np.concatenate([x[..., :distance], x[..., distance:] + x[..., :-distance]], axis=-1)
        distance *= 2
    return x
