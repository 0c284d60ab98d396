"""Counter-based randomness: the same (seed, position, token) gives the same noise in every process; holds no state.

Source: Philox4x32-10, Salmon et al. 2011 (Random123); docs/protocol.md, Noise. `runtime/sampling/noise.py` is the torch twin.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
FloatArray = npt.NDArray[np.float64]
IntLike = TypeVar("IntLike", bound=npt.ArrayLike)

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
MASK32 = 0xFFFFFFFF


class Stream(IntEnum):
    """What a draw is for; draws of different streams are independent."""

    PICK = 0
    DRAFT = 1
    ACCEPT = 2
    RECOVER = 3


def key_schedule(seed: int) -> list[tuple[int, int]]:
    """Return the 10 round keys (low word, high word) of a 64-bit seed."""
    low, high = seed & MASK32, (seed >> 32) & MASK32
    return [((low + i * KEY_STEPS[0]) & MASK32, (high + i * KEY_STEPS[1]) & MASK32) for i in range(ROUNDS)]


def philox(seed: int, counter: tuple[Words, Words, Words, Words]) -> tuple[Words, ...]:
    """Return the four 32-bit output words of Philox4x32-10 (as uint64), for broadcastable counters."""
    c0, c1, c2, c3 = counter
    mask, shift = np.uint64(MASK32), np.uint64(32)
    for key0, key1 in key_schedule(seed):
        product0, product1 = c0 * np.uint64(MULTIPLIERS[0]), c2 * np.uint64(MULTIPLIERS[1])
        c0, c1, c2, c3 = (
            (product1 >> shift) ^ c1 ^ np.uint64(key0),
            product1 & mask,
            (product0 >> shift) ^ c3 ^ np.uint64(key1),
            product0 & mask,
        )
    return c0, c1, c2, c3


def bits52(seed: int, positions: npt.ArrayLike, tokens: npt.ArrayLike, stream: int, epoch: int) -> Words:
    """Return 52 random bits per (position, token), broadcast: word 0 high, the top 20 bits of word 1 low."""
    counter = (
        np.asarray(positions, np.uint64),
        np.asarray(tokens, np.uint64),
        np.asarray(stream, np.uint64),
        np.asarray(epoch, np.uint64),
    )
    word0, word1, _, _ = philox(seed, counter)
    return (word0 << np.uint64(20)) | (word1 >> np.uint64(12))


def uniform(
    seed: int,
    positions: npt.ArrayLike,
    tokens: npt.ArrayLike,
    stream: Stream,
    epoch: int = 0,
) -> FloatArray:
    """Return u = (b + ½)·2⁻⁵² in (0, 1), never 0 and never 1, in float64.

    positions, tokens: broadcastable integers < 2³². epoch: 0 in stream PICK, else the step's prefix_len.
    """
    return unit(bits52(seed, positions, tokens, int(stream), epoch))


def unit(bits: Words) -> FloatArray:
    """Return u = (b + ½)·2⁻⁵² of bits b < 2⁵²: exact in float64, 2⁻⁵³ at the least and 1 − 2⁻⁵³ at the most."""
    result: FloatArray = (bits.astype(np.float64) + 0.5) * 2.0**-52
    return result


def gumbel(
    seed: int,
    positions: npt.ArrayLike,
    tokens: npt.ArrayLike,
    stream: Stream = Stream.PICK,
    epoch: int = 0,
) -> FloatArray:
    """Return g = −log(−log u) in float64; argmax(log p + g) is then a draw from p."""
    result: FloatArray = -np.log(-np.log(uniform(seed, positions, tokens, stream, epoch)))
    return result


def child_seed(seed: int, index: int) -> int:
    """Return the seed of returned sequence `index`: the request's own for 0, Philox(seed, index) above."""
    if index == 0:
        return seed
    zero = np.uint64(0)
    word0, word1, _, _ = philox(seed, (np.uint64(index), zero, zero, zero))  # type: ignore[arg-type]
    return int(word0) << 32 | int(word1)
