"""The noise of a (seed, position, token): a uniform number u, and g = −log(−log u)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from auditor.reference.elementary import log
from orchestrator.core.arrays import FloatArray
from orchestrator.core.noise import Stream, Words, philox


def uniform(
    seed: int,
    positions: npt.ArrayLike,
    tokens: npt.ArrayLike,
    stream: npt.ArrayLike,
    epoch: int = 0,
) -> FloatArray:
    """Return u in the open interval (0, 1), made of 52 bits: word 0, then the upper 20 bits of word 1.

    positions, tokens, stream: broadcastable integers < 2³². stream: a Stream, or that of a node (`Stream.of_node`).
    epoch: 0 in stream TARGET, else the step's prefix_len.
    Returns float64 in the broadcast shape.
    """
    position, token, stream_word, epoch_word = (np.asarray(x, np.uint64) for x in (positions, tokens, stream, epoch))
    word0, word1, _, _ = philox(seed, (position, token, stream_word, epoch_word))
    return unit((word0 << np.uint64(20)) | (word1 >> np.uint64(12)))


def unit(bits: Words) -> FloatArray:
    """Return u = (b + ½)·2⁻⁵² for bits b < 2⁵²: exact in float64, from 2⁻⁵³ to 1 − 2⁻⁵³."""
    result: FloatArray = (bits.astype(np.float64) + 0.5) * 2.0**-52
    return result


def gumbel(
    seed: int,
    positions: npt.ArrayLike,
    tokens: npt.ArrayLike,
    stream: npt.ArrayLike = Stream.TARGET,
    epoch: int = 0,
) -> FloatArray:
    """Return g = −log(−log u) for the u of `uniform`; argmax(log p + g) is then a sample of p."""
    result: FloatArray = -log(-log(uniform(seed, positions, tokens, stream, epoch)))
    return result
