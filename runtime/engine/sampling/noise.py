"""The noise of docs/wire.md on a GPU (torch): the same bits of u, on the device of the logits, one seed per row."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from orchestrator.core.noise import KEY_STEPS, MASK32, MULTIPLIERS, ROUNDS
from runtime.engine.staging import staged

#: Numbers whose noise is computed at once: several times as many words are in memory meanwhile.
MAX_NUMBERS = 1 << 23


def seed_words(seeds: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Split 64-bit seeds into (n, 1) int64 low and high words."""
    low, high = staged([(seed & MASK32, seed >> 32 & MASK32) for seed in seeds], device).split(1, dim=1)
    return low, high


class _Constants(NamedTuple):
    """Constants of Philox on a device, int64.

    multipliers: (3,), of words 0, 2 and 0. key_steps: (ROUNDS, 3), what a round adds to the key's words 1, 0 and 1.
    mask, half: (1,), 2³² − 1 and 32. Being tensors with an axis, these two make an int64 of what they meet.
    """

    multipliers: Tensor
    key_steps: Tensor
    mask: Tensor
    half: Tensor


@cache
def _constants(device: torch.device) -> _Constants:
    key_steps = [[number * KEY_STEPS[word] for word in (1, 0, 1)] for number in range(ROUNDS)]
    values = [*MULTIPLIERS, MULTIPLIERS[0]], key_steps, [MASK32], [32]
    return _Constants(*(torch.tensor(value, device=device) for value in values))


def _philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> Tensor:
    """Return words 0 and 1 of Philox4x32-10 as the upper and the lower half of an int64.

    An operation is a launch on a GPU: so two words are multiplied at once, and the halves of a product are views of it.
    `even` holds words 0 and 2, and after every other round 2 and 0; `odd` holds the words that meet the products of
    these two: 3 and 1, or 1 and 3.
    """
    ndim = max(word.ndim for word in (*counter, *key))
    trailing = (1,) * ndim
    multipliers, key_steps, mask, half = _constants(counter[0].device)
    multipliers, key_steps = multipliers.view(3, *trailing), key_steps.view(ROUNDS, 3, *trailing)
    even = _side_by_side((counter[0], counter[2]), ndim)
    odd, _ = _halves(_side_by_side((counter[3], counter[1]), ndim))
    keys, _ = _halves(_side_by_side((key[1], key[0], key[1]), ndim) + key_steps)
    for number in range(ROUNDS - 1):
        own = slice(number % 2, number % 2 + 2)
        low, high = _halves(even * multipliers[own])
        even = ((high ^ odd) ^ keys[number, own]) & mask
        odd = low.flip(0)
    # The last round's other words are not needed.
    return even[0] * MULTIPLIERS[1] ^ (odd[0] ^ keys[-1, 1]) << half


def _side_by_side(words: Sequence[Tensor], ndim: int) -> Tensor:
    """Return words as one tensor, along a new first axis before `ndim` others."""
    stacked = torch.stack(torch.broadcast_tensors(*words))
    return stacked.view(len(words), *(1,) * (ndim + 1 - stacked.ndim), *stacked.shape[1:])


def _halves(words: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower and the upper half of int64 as int32, without a copy; both GPUs and CPUs are little-endian."""
    low, high = words[..., None].view(torch.int32).unbind(-1)
    return low, high


def uniform(
    key: tuple[Tensor, Tensor], positions: Tensor, tokens: Tensor, stream: int | Tensor, epoch: int | Tensor = 0
) -> Tensor:
    """Return u in (0, 1), float64, bit for bit that of docs/wire.md, Noise.

    key: two words as `seed_words` returns them. positions, tokens, stream, epoch: int64. All are broadcast to the shape
    of the result.
    """
    stream, epoch = (x if isinstance(x, Tensor) else tokens.new_full((), x) for x in (stream, epoch))
    return unit((_philox((positions, tokens, stream, epoch), key) >> 12) & ((1 << 52) - 1))


def unit(bits: Tensor) -> Tensor:
    """Return u = (b + ½)·2⁻⁵² of int64 bits b < 2⁵², exactly."""
    return (bits.double() + 0.5) * 2.0**-52


def gumbel(
    key: tuple[Tensor, Tensor], positions: Tensor, tokens: Tensor, stream: int | Tensor = 0, epoch: int | Tensor = 0
) -> Tensor:
    """Return g = −log(−log u), float64, u being `uniform` of the same arguments; argmax(log p + g) is a sample of p.

    Up to the rounding of torch's log, which is below 1e-12, it is the g of docs/wire.md.
    """
    return -(-uniform(key, positions, tokens, stream, epoch).log()).log()


def draw(log_weights: Tensor, key: tuple[Tensor, Tensor], positions: Tensor, stream: int, epochs: Tensor) -> Tensor:
    """Return argmax(log weights + noise) per row, (n,) int64; ties go to the lowest id.

    log_weights: (n, V) float64, overwritten; the weights need not sum to 1. Noise is computed for every token, since
    to find the support the host would have to wait for the device. key: two words, (n, 1) int64 each. positions,
    epochs: (n, 1) int64.
    """
    tokens = torch.arange(log_weights.shape[-1], device=log_weights.device)[None]
    rows = max(1, MAX_NUMBERS // log_weights.shape[-1])
    for start in range(0, len(log_weights), rows):
        part = slice(start, start + rows)
        own_key = (key[0][part], key[1][part])
        log_weights[part] += gumbel(own_key, positions[part], tokens, stream, epochs[part])
    return log_weights.argmax(dim=-1)
