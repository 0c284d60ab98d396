"""The rotary angles of positions, computed once for all passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

#: How many positions are computed at a time.
CHUNK = 512


class Rotations:
    """cosines, sines: (positions so far, head_dim / 2) float32; a row depends only on its position."""

    def __init__(self, rotary: Any) -> None:
        """rotary: the rotary embedding of a stock transformers model."""
        self._inverse_frequencies: Floats = rotary.inv_freq.float().numpy()
        self._scale = float(rotary.attention_scaling)
        self.cosines: Floats = np.empty((0, len(self._inverse_frequencies)), np.float32)
        self.sines: Floats = self.cosines

    def reach(self, position: int) -> None:
        """Compute the rows up to this position."""
        while len(self.cosines) <= position:
            chunk = np.arange(len(self.cosines), len(self.cosines) + CHUNK, dtype=np.float32)
            # The angle is computed in float32, as in transformers; its cosine is rounded once.
            angles = (chunk[:, None] * self._inverse_frequencies).astype(np.float64)
            cosines, sines = (function(angles) * self._scale for function in (np.cos, np.sin))
            self.cosines = np.concatenate([self.cosines, cosines.astype(np.float32)])
            self.sines = np.concatenate([self.sines, sines.astype(np.float32)])
