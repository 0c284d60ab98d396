"""Brings arrays from the host to the device, all those of a pass in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

#: Every array begins at a multiple of this many bytes, so that it can be viewed in its own dtype.
ALIGNMENT = 8
DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.bool_): torch.bool,
}


def stage(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return the arrays on the device, in their shapes and dtypes: int64, float64 or bool.

    The host does not wait for the copy: memory that is pinned can be copied without a wait, and torch keeps it until
    the copy is done.
    """
    sizes = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    stops = np.cumsum(sizes).tolist()
    content = host.numpy()
    for array, stop, size in zip(arrays, stops, sizes, strict=True):
        content[stop - size : stop - size + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    staged = host.to(device, non_blocking=True)
    return [
        staged[stop - size : stop - size + array.nbytes].view(DTYPES[array.dtype]).view(array.shape)
        for array, stop, size in zip(arrays, stops, sizes, strict=True)
    ]
