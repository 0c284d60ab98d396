"""Logits as a request changes them before the temperature: penalties, bias, masks (numpy, float64, one position).

The reference that `runtime/sampling/logits_processors.py` is tested against. Order: repetition, frequency and presence penalty, bias,
then the masks: grammar, allowed ids, bad words, no end before min_tokens (docs/sampling.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from orchestrator.core.sampling_params import Sampling
from orchestrator.core.types import FloatArray

BoolArray = npt.NDArray[np.bool_]


def shape(
    logits: FloatArray,
    prompt: Sequence[int],
    output: Sequence[int],
    sampling: Sampling,
    legal: BoolArray | None = None,
) -> FloatArray:
    """Return the logits of the token behind prompt + output as the request wants them.

    logits: (V,) float64. legal: (V,) bool, the tokens that the grammar allows there; None = no grammar.
    Invariant: a mask that would leave no token changes nothing, so that something can always be said.
    """
    shaped = _penalised(logits, prompt, output, sampling)
    for token, weight in sampling.logits_options.bias:
        shaped[token] += weight
    for forbidden in _masks(len(logits), [*prompt, *output], len(output), sampling, legal):
        masked = np.where(forbidden, -np.inf, shaped)
        shaped = masked if np.isfinite(masked).any() else shaped
    return shaped


def _penalised(logits: FloatArray, prompt: Sequence[int], output: Sequence[int], sampling: Sampling) -> FloatArray:
    """Divide what was said (multiply where negative), then subtract by how often the output says it, and once more."""
    shaped = logits.copy()
    if not sampling.penalised:
        return shaped
    said = sorted({*prompt, *output})
    shaped[said] = penalised(logits[said], sampling.repetition_penalty)
    for token in set(output):
        shaped[token] -= sampling.frequency_penalty * output.count(token)
        shaped[token] -= sampling.presence_penalty
    return shaped


def penalised(logits: FloatArray, penalty: float) -> FloatArray:
    """Return the logits of tokens that were said, under a repetition penalty (Keskar et al. 2019, arXiv:1909.05858)."""
    return np.where(logits > 0, logits / penalty, logits * penalty)


def _masks(
    vocab_size: int, ids: Sequence[int], num_output: int, sampling: Sampling, legal: BoolArray | None
) -> Iterator[BoolArray]:
    """Yield (V,) bool, what each mask forbids behind `ids`."""
    logits_options = sampling.logits_options
    if legal is not None:
        yield ~legal
    if logits_options.allowed:
        yield ~_members(vocab_size, logits_options.allowed)
    if logits_options.bad_words:
        yield _members(vocab_size, [word[-1] for word in logits_options.bad_words if completes(word, ids)])
    if num_output < sampling.min_tokens:
        yield _members(vocab_size, logits_options.end_ids)


def _members(vocab_size: int, ids: Sequence[int]) -> BoolArray:
    members = np.zeros(vocab_size, np.bool_)
    members[list(ids)] = True
    return members


def completes(word: Sequence[int], ids: Sequence[int]) -> bool:
    """Return True when the last token of `word` would complete it behind `ids`."""
    length = len(word) - 1
    if length == 0:
        return True
    if length > len(ids) or ids[-1] != word[-2]:  # as a rule it is settled here
        return False
    return tuple(ids[-length:]) == tuple(word[:-1])


def merged_bias(pairs: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Return one weight per id, those of equal ids added up, as float32 has them: so they reach the engines."""
    weights: dict[int, float] = {}
    for token, weight in pairs:
        weights[token] = float(np.float32(weights.get(token, 0.0) + weight))
    return tuple(weights.items())
