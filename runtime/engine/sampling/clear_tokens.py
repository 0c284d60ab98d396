"""Target tokens in few operations, where these decide them clearly.

The definition (docs/wire.md, Arithmetic) makes log and exp of hundreds of operations, each of them a launch on a GPU.
torch's own functions differ from it, and between devices, by rounding alone, here by less than 1e-12. So they give the
same token wherever every comparison that matters is further than MARGIN from a tie. The noise has the exact bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from orchestrator.core.noise import MASK32, Stream
from orchestrator.core.sampling_params import Sampling
from runtime.engine.sampling.noise import uniform
from runtime.engine.staging import stage

#: Unequal float32 logits are rarely as close as this.
MARGIN = 1e-9
#: A truncated row is decided among this many of its most probable tokens.
SHORTLIST = 1024
#: Stands for the token of a row that is not clear.
UNCLEAR = -1


class _Rows(NamedTuple):
    """Rows that are decided together: their samplings, and columns on the device, (n, 1) int64 or float64.

    place, offset: where a row's k-th token is on the shortlist, and 0; without top-k any place, and −inf. top_p, floor:
    inf and −inf switch top-p and min-p off.
    """

    samplings: list[Sampling]
    row: Tensor
    seed_low: Tensor
    seed_high: Tensor
    position: Tensor
    place: Tensor
    temperature: Tensor
    offset: Tensor
    top_p: Tensor
    floor: Tensor


def clear_tokens(logits: Tensor, positions: Sequence[int], samplings: Sequence[Sampling]) -> list[int]:
    """Return the target token of every row, (n,), or UNCLEAR; reads the device once.

    logits: (n, V) in the model's dtype. positions: (n,), absolute position of the token that each row decides.
    samplings: (n,).
    Invariant: a token is that of `orchestrator.core.sampling.distribution.sample`; a result depends on no other row.
    """
    vocab_size = logits.shape[-1]
    deciders = [_decider(sampling, vocab_size) for sampling in samplings]
    groups = {
        decide: [row for row, own in enumerate(deciders) if own is decide]
        for decide in (_of_vocabulary, _of_shortlist)
        if decide in deciders
    }
    arrays = [array for rows in groups.values() for array in _columns(rows, positions, samplings, vocab_size)]
    staged = iter(stage(arrays, logits.device))
    result = logits.argmax(dim=-1)
    for (decide, rows), integers, numbers in zip(groups.items(), staged, staged, strict=True):
        columns = _Rows([samplings[row] for row in rows], *integers.split(1, dim=1), *numbers.split(1, dim=1))
        if len(rows) == len(samplings):
            result = decide(logits, columns)
        else:
            index = columns.row[:, 0]
            result[index] = decide(logits[index], columns)
    return [UNCLEAR if decide is None else token for token, decide in zip(result.tolist(), deciders, strict=True)]


def _decider(sampling: Sampling, vocab_size: int) -> Callable[..., Tensor] | None:
    """Return what decides rows of a sampling; None if only the definition can."""
    if sampling.greedy:
        return torch.argmax
    if sampling.typical_p < 1.0 or SHORTLIST <= sampling.top_k < vocab_size:
        return None
    is_truncated = 0 < sampling.top_k < vocab_size or sampling.top_p < 1.0 or sampling.min_p > 0.0
    return _of_shortlist if is_truncated else _of_vocabulary


def _columns(
    rows: Sequence[int], positions: Sequence[int], samplings: Sequence[Sampling], vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the integers and the other numbers of `_Rows`, (n, 5) int64 and (n, 4) float64."""
    integers, numbers = [], []
    for row in rows:
        own = samplings[row]
        has_top_k = 0 < own.top_k < vocab_size
        seed_words = own.seed & MASK32, own.seed >> 32 & MASK32
        integers.append((row, *seed_words, positions[row], own.top_k - 1 if has_top_k else 0))
        limits = own.top_p if own.top_p < 1.0 else math.inf, math.log(own.min_p) if own.min_p > 0.0 else -math.inf
        numbers.append((own.temperature, 0.0 if has_top_k else -math.inf, *limits))
    return np.array(integers, np.int64), np.array(numbers, np.float64)


def _of_vocabulary(logits: Tensor, rows: _Rows) -> Tensor:
    """Return the clear tokens of rows without truncation, (n,); logits: (n, V)."""
    shifted = _shifted(logits, rows)
    tokens = torch.arange(logits.shape[-1], device=logits.device)
    best, near = _best(shifted + _noise(rows, tokens))
    return torch.where(near == 1, best, UNCLEAR)[:, 0]


def _of_shortlist(logits: Tensor, rows: _Rows) -> Tensor:
    """Return the clear tokens of rows that are truncated by top-k, top-p or min-p, (n,); logits: (n, V)."""
    shifted = _shifted(logits, rows)
    listed, tokens = _shortlist(shifted)
    slack = _slack(shifted, listed, rows)
    is_kept = (slack > 0.0).all(dim=0)
    is_unclear = (slack.abs() < MARGIN).any(dim=0)
    if listed.shape[-1] < shifted.shape[-1]:  # a token beside the list may be kept too
        is_unclear |= is_kept & (listed == listed[:, -1:])
    best, near = _best((listed + _noise(rows, tokens)).where(is_kept, -math.inf))
    is_clear = (near == 1) & ~is_unclear.any(dim=-1, keepdim=True)
    return tokens.gather(-1, best).where(is_clear, UNCLEAR)[:, 0]


def _shifted(logits: Tensor, rows: _Rows) -> Tensor:
    """Return log p without its constant, (n, V) float64: the logits over the temperature, the best one being 0."""
    scaled = logits.double() / rows.temperature
    return scaled - scaled.amax(dim=-1, keepdim=True)


def _noise(rows: _Rows, tokens: Tensor) -> Tensor:
    """Return the target's noise up to rounding, (n, k) float64; tokens: (k,) or (n, k)."""
    return -(-uniform((rows.seed_low, rows.seed_high), rows.position, tokens, Stream.TARGET).log()).log()


def _best(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the place of each row's best score, and how many scores are near it, itself included, (n, 1) int64."""
    best, places = scores.max(dim=-1, keepdim=True)
    return places, (scores > best - MARGIN).sum(dim=-1, keepdim=True)


def _shortlist(shifted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the most probable tokens in order, equals by id: their log p without its constant and ids, (n, k)."""
    size = min(SHORTLIST, shifted.shape[-1])
    ids = shifted.topk(size, dim=-1, sorted=False).indices.sort(dim=-1).values
    listed, order = shifted.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return listed, ids.gather(-1, order)


def _slack(shifted: Tensor, listed: Tensor, rows: _Rows) -> Tensor:
    """Return by how much each truncation keeps each token of the shortlist, (truncations, n, k); dropped below 0.

    Tokens that tie exactly with the k-th are kept as it is, those just below it are not clear.
    """
    slack: list[Tensor] = []
    if any(own.top_k for own in rows.samplings):
        slack.append(listed - (listed.gather(-1, rows.place) + rows.offset) + MARGIN)
    if any(own.top_p < 1.0 for own in rows.samplings):
        weights, mass = listed.exp(), shifted.exp().sum(dim=-1, keepdim=True)
        if slack:
            kept = weights.where(slack[0] > 0.0, 0.0).sum(dim=-1, keepdim=True)
            mass = kept.where(rows.offset == 0.0, mass)
        slack.append(rows.top_p * mass - (weights.cumsum(dim=-1) - weights))
    if any(own.min_p > 0.0 for own in rows.samplings):
        slack.append(listed - rows.floor)
    return torch.stack(slack)
