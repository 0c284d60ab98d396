"""Linear layers in oneDNN's own blocked layout: on a CPU, what makes a small tree cost little more than a token.

Measured (docs/performance.md): MKL's product of 11 rows costs 2.3 times that of one row, oneDNN's packed one 1.3 times.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

PACKED_DTYPES = (torch.float32, torch.bfloat16)


class BorrowedLinear(nn.Module):
    """y = x Wᵀ for a W, (out, in), that is another model's: neither learnt nor stored with the module that uses it."""

    bias = None

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("weight", weight, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (…, in) → (…, out)."""
        return functional.linear(x, self.get_buffer("weight"))


class PackedLinear(nn.Module):
    """y = x Wᵀ + b for a fixed W. in_features, out_features: as in nn.Linear.

    oneDNN compiles a kernel per number of rows, 0.6 MB each, and keeps the last 1,024 twice (measured: 700 MB
    after a while, and 10 ms whenever a number is new). So rows are padded to a few numbers.
    """

    def __init__(self, linear: nn.Linear | BorrowedLinear) -> None:
        super().__init__()
        weight = cast(Tensor, linear.weight)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias, self.dtype = linear.bias, weight.dtype
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        """x: (…, rows, in_features) → (…, rows, out_features)."""
        rows = x.shape[-2]
        missing = padded_rows(rows) - rows
        if missing:
            x = functional.pad(x, (0, 0, 0, missing))
        result = cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], ""))
        return result.narrow(-2, 0, rows) if missing else result


def padded_rows(rows: int) -> int:
    """Return the least of the numbers 1 … 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, … that is no less than `rows`."""
    step = 1 << max((rows - 1).bit_length() - 3, 0)
    return -(-rows // step) * step


@torch.inference_mode()
def compile_kernels(model: nn.Module, max_rows: int) -> None:
    """Compile what the packed layers need for up to `max_rows` rows; oneDNN keeps it for the calling thread."""
    # torch tells a new thread how many threads it has only when it is asked, and a kernel is compiled for a number.
    torch.get_num_threads()
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    for layer in {(layer.in_features, layer.out_features): layer for layer in layers}.values():
        for rows in sorted({padded_rows(rows) for rows in range(1, max_rows + 1)}):
            layer(torch.zeros(1, rows, layer.in_features, dtype=layer.dtype))


def pack_linears(model: nn.Module, device: torch.device, dtype: torch.dtype) -> int:
    """Replace every linear layer by its packed equal where that is possible and exact enough; return their number."""
    if device.type != "cpu" or dtype not in PACKED_DTYPES or not _can_pack(dtype):
        return 0
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in (nn.Linear, BorrowedLinear):
                setattr(parent, name, PackedLinear(cast(nn.Linear, child)))
                replaced += 1
    return replaced


def _can_pack(dtype: torch.dtype) -> bool:
    """True when this build of torch has the operators, and they agree with its own product.

    They are not public; a torch without them, or with others under the same names, must still serve.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    linear = nn.Linear(48, 32, dtype=dtype)
    x = torch.linspace(-1.0, 1.0, 5 * 48, dtype=dtype).view(1, 5, 48)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    try:
        packed = PackedLinear(linear)(x)
    except (AttributeError, RuntimeError, TypeError):
        return False
    return torch.allclose(packed, linear(x), rtol=tolerance, atol=tolerance)
