"""Packed layers say what plain ones say, whatever the number of rows, and borrowed weights are not stored."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from runtime.models.fused import BorrowedLinear, PackedLinear, compile_kernels, pack_linears, padded_rows

ROWS = [1, 2, 7, 8, 9, 13, 33, 70]


class Two(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.own = nn.Linear(48, 32, dtype=dtype)
        self.borrowed = BorrowedLinear(torch.randn(40, 32, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.borrowed(self.own(x))
        return y


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.3)])
@torch.inference_mode()
def test_packed_layers_equal_plain_ones(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    module = Two(dtype)
    inputs = [torch.randn(rows, 48, dtype=dtype) for rows in ROWS]
    expected = [module(x) for x in inputs]
    pack_linears(module, torch.device("cpu"), dtype)
    assert isinstance(module.own, PackedLinear) == isinstance(module.borrowed, PackedLinear)
    compile_kernels(module, max(ROWS))
    assert all((module(x) - y).abs().max() < tolerance for x, y in zip(inputs, expected, strict=True))


def test_a_borrowed_weight_is_neither_learnt_nor_stored() -> None:
    module = Two(torch.float32)
    assert set(module.state_dict()) == {"own.weight", "own.bias"}
    assert len(list(module.parameters())) == 2


def test_float64_is_not_packed() -> None:
    module = Two(torch.float64)
    pack_linears(module, torch.device("cpu"), torch.float64)
    assert not isinstance(module.own, PackedLinear) and not isinstance(module.borrowed, PackedLinear)


def test_rows_are_padded_to_few_numbers() -> None:
    found = [padded_rows(rows) for rows in range(1, 257)]
    assert all(padded >= rows for rows, padded in enumerate(found, start=1))
    assert len(set(found)) < 30
