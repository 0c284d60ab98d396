"""The noise of `orchestrator/core/noise.py` in torch: the same bits, on the device of the logits, one seed per row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from orchestrator.core.noise import KEY_STEPS, MASK32, MULTIPLIERS, ROUNDS
from runtime.sampling.elementary import log


def seed_words(seeds: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Split 64-bit seeds into (n, 1) int64 low and high words."""
    low = torch.tensor([seed & MASK32 for seed in seeds], dtype=torch.int64, device=device)
    high = torch.tensor([(seed >> 32) & MASK32 for seed in seeds], dtype=torch.int64, device=device)
    return low[:, None], high[:, None]


def _philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return the four output words of Philox4x32-10 as int64 in 0…2³²−1.

    int64 products wrap around, which keeps their low 64 bits right; the mask removes the sign bits that >> copies.
    """
    c0, c1, c2, c3 = counter
    key0, key1 = key
    for _ in range(ROUNDS):
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0 = ((product1 >> 32) & MASK32) ^ c1 ^ key0
        c1 = product1 & MASK32
        c2 = ((product0 >> 32) & MASK32) ^ c3 ^ key1
        c3 = product0 & MASK32
        key0, key1 = (key0 + KEY_STEPS[0]) & MASK32, (key1 + KEY_STEPS[1]) & MASK32
    return c0, c1, c2, c3


def uniform(
    key: tuple[Tensor, Tensor], positions: Tensor, tokens: Tensor, stream: int | Tensor, epoch: int | Tensor = 0
) -> Tensor:
    """Return u in (0, 1), float64, bit for bit that of `orchestrator.core.noise.uniform`.

    key: two words as `seed_words` returns them. positions, tokens, stream, epoch: int64. All are broadcast to the shape
    of the result.
    """
    stream, epoch = (torch.as_tensor(number, device=tokens.device) for number in (stream, epoch))
    word0, word1, _, _ = _philox((positions, tokens, stream, epoch), key)
    return unit((word0 << 20) | (word1 >> 12))


def unit(bits: Tensor) -> Tensor:
    """Return u = (b + ½)·2⁻⁵² of int64 bits b < 2⁵², as `orchestrator.core.noise.unit` does."""
    return (bits.double() + 0.5) * 2.0**-52


def gumbel(
    key: tuple[Tensor, Tensor], positions: Tensor, tokens: Tensor, stream: int | Tensor = 0, epoch: int | Tensor = 0
) -> Tensor:
    """Return g = −log(−log u), float64, u being `uniform` of the same arguments; argmax(log p + g) is a sample of p."""
    return -log(-log(uniform(key, positions, tokens, stream, epoch)))


def draw(log_weights: Tensor, key: tuple[Tensor, Tensor], positions: Tensor, stream: int, epochs: Tensor) -> Tensor:
    """Return argmax(log weights + noise) per row, (n,) int64; ties go to the lowest id.

    log_weights: (n, V) float64, overwritten; the weights need not sum to 1. Noise is computed only for their support,
    which is often small. key: two words, (n, 1) int64 each. positions, epochs: (n, 1) int64.
    """
    rows, tokens = torch.nonzero(log_weights > -torch.inf, as_tuple=True)
    low, high, at, epoch = (column[rows, 0] for column in (*key, positions, epochs))
    log_weights[rows, tokens] += gumbel((low, high), at, tokens, stream, epoch)
    return log_weights.argmax(dim=-1)
