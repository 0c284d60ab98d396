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
