"""Counter-based random numbers: (seed, position, token) gives the same noise in every process; there is no state.

Source: Philox4x32-10, Salmon et al. 2011 (Random123); docs/wire.md, Noise.
Torch twin: `runtime/engine/sampling/noise.py`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Node = TypeVar("Node", int, npt.NDArray[np.int64])

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
MASK32 = 0xFFFFFFFF


class Stream(IntEnum):
    """What a random number is used for; numbers of different streams are independent."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RECOVER = 3

    def of_node(self, node: Node) -> Node:
        """Return the stream of a node's own numbers, or those of several nodes; the root, node 0, has this stream."""
        return self.value + len(Stream) * node


def philox(seed: int, counter: tuple[Words, Words, Words, Words]) -> tuple[Words, ...]:
    """Return the four output words of Philox4x32-10.

    seed: 64 bits, the key. counter: four broadcastable uint64 arrays, each < 2³².
    Returns four uint64 arrays, each < 2³².
    """
    c0, c1, c2, c3 = counter
    key0, key1 = seed & MASK32, (seed >> 32) & MASK32
    mask, shift = np.uint64(MASK32), np.uint64(32)
    for _ in range(ROUNDS):
        product0, product1 = c0 * np.uint64(MULTIPLIERS[0]), c2 * np.uint64(MULTIPLIERS[1])
        c0, c1, c2, c3 = (
            (product1 >> shift) ^ c1 ^ np.uint64(key0),
            product1 & mask,
            (product0 >> shift) ^ c3 ^ np.uint64(key1),
            product0 & mask,
        )
        key0, key1 = (key0 + KEY_STEPS[0]) & MASK32, (key1 + KEY_STEPS[1]) & MASK32
    return c0, c1, c2, c3


def child_seed(seed: int, index: int) -> int:
    """Return the seed of returned sequence `index`: the request's own for 0, else two words of Philox(seed, index)."""
    if index == 0:
        return seed
    zero = np.uint64(0)
    word0, word1, _, _ = philox(seed, (np.uint64(index), zero, zero, zero))  # type: ignore[arg-type]
    return int(word0) << 32 | int(word1)
