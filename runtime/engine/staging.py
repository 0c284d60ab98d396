"""Brings arrays from the host to the device and back, several in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

#: Every array begins at a multiple of this many bytes, so that it can be viewed in its own dtype.
ALIGNMENT = 8
DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}


def stage(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return the arrays on the device, in their shapes and dtypes, those of DTYPES.

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


def staged(numbers: npt.ArrayLike, device: torch.device) -> Tensor:
    """Return numbers on the device, in a dtype that `stage` takes, without a wait for it."""
    array = np.asarray(numbers)
    return torch.from_numpy(array) if device.type == "cpu" else stage([array], device)[0]


def fetch(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """Return tensors of one device in the host's memory, in their shapes and dtypes; the host waits for it once."""
    if not tensors or tensors[0].device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    fetched = torch.cat(parts).cpu().split([len(part) for part in parts])
    # A part need not begin at a multiple of its numbers' size, so it is copied.
    return [
        part.clone().view(tensor.dtype).view(tensor.shape).numpy()
        for part, tensor in zip(fetched, tensors, strict=True)
    ]
