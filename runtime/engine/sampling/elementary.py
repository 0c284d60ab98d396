"""log, exp and sums of `orchestrator/core/elementary.py` in torch, with the same bits on every device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from orchestrator.core.elementary import (
    EXP_LOWEST,
    EXPONENT_BIAS,
    FRACTION_BITS,
    FRACTION_MASK,
    LOG2_E,
    ONE,
    ROUNDING,
    SMALLEST_NORMAL,
    SQRT_HALF,
    SUBNORMAL_SHIFT,
    exp_of_parts,
    log_of_parts,
)


def log(x: Tensor) -> Tensor:
    """Return log x, float64: −∞ for 0, nan for a negative number."""
    is_subnormal = x < SMALLEST_NORMAL
    bits = torch.where(is_subnormal, x * 2.0**SUBNORMAL_SHIFT, x).view(torch.int64) + (ONE - SQRT_HALF)
    exponents = (bits >> FRACTION_BITS) - EXPONENT_BIAS - SUBNORMAL_SHIFT * is_subnormal
    fractions = ((bits & FRACTION_MASK) + SQRT_HALF).view(torch.float64)
    result = log_of_parts(fractions - 1.0, exponents.double())
    special = torch.where(x == 0.0, -torch.inf, torch.where(x > 0.0, x, torch.nan))
    return torch.where((x > 0.0) & (x < torch.inf), result, special)


def exp(x: Tensor) -> Tensor:
    """Return exp x for x ≤ 0, float64; 0 below EXP_LOWEST."""
    clipped = x.clamp(min=EXP_LOWEST)
    shifted = clipped * LOG2_E + ROUNDING
    scale = (shifted.view(torch.int64) + EXPONENT_BIAS << FRACTION_BITS).view(torch.float64)
    return (exp_of_parts(clipped, shifted - ROUNDING) * scale).masked_fill(x < EXP_LOWEST, 0.0)


def total(x: Tensor) -> Tensor:
    """Return the sum over the last axis, which keeps length 1."""
    length = x.shape[-1]
    # One operation a level: −0.0, unlike 0.0, leaves every bit of what it is added to.
    x = functional.pad(x, (0, (1 << (length - 1).bit_length()) - length), value=-0.0)
    while x.shape[-1] > 1:
        low, high = x.chunk(2, dim=-1)
        x = low + high
    return x


def running_total(x: Tensor) -> Tensor:
    """Return the sums of the first 1, 2, 3 … numbers along the last axis."""
    distance = 1
    while distance < x.shape[-1]:
        x = torch.cat([x[..., :distance], x[..., distance:] + x[..., :-distance]], dim=-1)
        distance *= 2
    return x


def log_softmax(logits: Tensor) -> Tensor:
    """Return log-probabilities over the last axis, float64; −inf stays −inf."""
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    return shifted - log(total(exp(shifted)))
