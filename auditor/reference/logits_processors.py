"""The logits processors, applied before the temperature: penalties, bias, masks (numpy, float64, one position).

Order: repetition, frequency and presence penalty,
bias, then the masks: grammar, allowed ids, bad words, end ids before min_tokens (docs/sampling.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from orchestrator.core.arrays import BoolArray, FloatArray
from orchestrator.core.sampling_params import Sampling


def process_logits(
    logits: FloatArray,
    prompt: Sequence[int],
    output: Sequence[int],
    sampling: Sampling,
    legal: BoolArray | None = None,
) -> FloatArray:
    """Return the logits of the token after prompt + output, changed as the request asks.

    logits: (V,) float64. legal: (V,) bool, the tokens that the grammar allows there; None: no grammar.
    Invariant: a mask that would leave no token is ignored, so that there is always a token to sample.
    """
    processed = _penalise(logits, prompt, output, sampling)
    for token, weight in sampling.logits_options.bias:
        processed[token] += weight
    for forbidden in _masks(len(logits), [*prompt, *output], len(output), sampling, legal):
        masked = np.where(forbidden, -np.inf, processed)
        processed = masked if np.isfinite(masked).any() else processed
    return processed


def _penalise(logits: FloatArray, prompt: Sequence[int], output: Sequence[int], sampling: Sampling) -> FloatArray:
    """Return the penalised logits.

    Repetition penalty (Keskar et al. 2019, arXiv:1909.05858): divide the positive logits of all tokens that occur in
    prompt or output, multiply the negative ones. Frequency penalty: subtract once per occurrence in the output.
    Presence penalty: subtract once.
    """
    penalised = logits.copy()
    if not sampling.penalised:
        return penalised
    seen = sorted({*prompt, *output})
    penalty = sampling.repetition_penalty
    penalised[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    for token, count in Counter(output).items():
        penalised[token] -= sampling.frequency_penalty * count
        penalised[token] -= sampling.presence_penalty
    return penalised


def _masks(
    vocab_size: int, ids: Sequence[int], num_output: int, sampling: Sampling, legal: BoolArray | None
) -> Iterator[BoolArray]:
    """Yield the tokens that each mask forbids after `ids`, (V,) bool."""
    options = sampling.logits_options
    if legal is not None:
        yield ~legal
    if options.allowed:
        yield ~_members(vocab_size, options.allowed)
    if options.bad_words:
        yield _members(vocab_size, [word[-1] for word in options.bad_words if _completes(word, ids)])
    if num_output < sampling.min_tokens:
        yield _members(vocab_size, options.end_ids)


def _members(vocab_size: int, ids: Sequence[int]) -> BoolArray:
    members = np.zeros(vocab_size, np.bool_)
    members[list(ids)] = True
    return members


def _completes(word: Sequence[int], ids: Sequence[int]) -> bool:
    """Return True if the last token of `word`, appended to `ids`, would complete the word."""
    before = word[:-1]
    return len(before) <= len(ids) and list(ids[len(ids) - len(before) :]) == list(before)
