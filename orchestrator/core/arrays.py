"""The types of the arrays that parts pass to each other; the docstrings that use them say which shape they have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

#: Token ids, and numbers of a tree's nodes.
IdArray = npt.NDArray[np.int32]
#: Logits, probabilities and noise.
FloatArray = npt.NDArray[np.float64]
#: Hidden states, one row per token.
Features = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
#: The inputs or outputs of a Triton model by name.
Tensors = dict[str, npt.NDArray[Any]]
Incoming = Mapping[str, npt.NDArray[Any]]


def total(x: FloatArray) -> FloatArray:
    """Return the sum over the last axis, which keeps length 1: the upper half is added to the lower, repeatedly.

    The axis is treated as padded with zeros to the next power of two, so zeros at the end change nothing.
    """
    while (length := x.shape[-1]) > 1:
        half = 1 << (length - 1).bit_length() - 1
        low = x[..., :half].copy()
        low[..., : length - half] += x[..., half:]
        x = low
    return x
