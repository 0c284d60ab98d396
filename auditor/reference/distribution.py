"""From logits to the distribution p, and to the target's token.

log, exp and every sum are those of `auditor.reference.elementary`, so that every processor gives the same bits.
Order: temperature, top-k, top-p, min-p, typical-p (docs/sampling.md); each renormalises the tokens that it keeps.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from auditor.reference.elementary import exp, log, running_total
from auditor.reference.noise import gumbel
from orchestrator.core.arrays import BoolArray, FloatArray, total
from orchestrator.core.sampling_params import Sampling


def log_softmax(logits: FloatArray) -> FloatArray:
    """Return log probabilities over the last axis; −inf stays −inf."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: FloatArray = shifted - log(total(exp(shifted)))
    return result


def log_p(logits: FloatArray, sampling: Sampling) -> FloatArray:
    """Return log p of the distribution that tokens are sampled from.

    logits: (n, V) float64.
    Returns (n, V) float64; −inf outside the support.
    Invariant: the logsumexp of each row is 0. At temperature 0, p is the point mass on the lowest id among the
    largest logits.
    """
    if sampling.greedy:
        result = np.full_like(logits, -np.inf)
        result[np.arange(len(logits)), logits.argmax(axis=-1)] = 0.0
        return result
    result = log_softmax(logits / sampling.temperature)
    for truncate in (_top_k, _top_p, _min_p, _typical_p):
        result = truncate(result, sampling)
    return result


def sample(logits: FloatArray, positions: npt.ArrayLike, sampling: Sampling) -> npt.NDArray[np.int64]:
    """Return the target's token for each row: argmax(log p + noise), ties to the lowest id.

    logits: (n, V) float64. positions: (n,) integers, the absolute position of the token that each row decides.
    Returns (n,) int64.
    Invariant: over all seeds the token has the distribution p; at temperature 0 it is the argmax.
    Source: the Gumbel-max trick; drafter-invariant coupling, Daliri et al. 2024, arXiv:2408.07978.
    """
    scores = logits
    if not sampling.greedy:
        noise = gumbel(sampling.seed, np.asarray(positions)[:, None], np.arange(logits.shape[-1]))
        scores = log_p(logits, sampling) + noise
    tokens: npt.NDArray[np.int64] = scores.argmax(axis=-1)
    return tokens


def _keep(log_probs: FloatArray, kept: BoolArray) -> FloatArray:
    return log_softmax(np.where(kept, log_probs, -np.inf))


def _top_k(log_probs: FloatArray, sampling: Sampling) -> FloatArray:
    """Keep the k most probable tokens, and all that tie with the k-th."""
    if not 0 < sampling.top_k < log_probs.shape[-1]:
        return log_probs
    kth = np.sort(log_probs, axis=-1)[:, -sampling.top_k, None]
    return _keep(log_probs, log_probs >= kth)


def _top_p(log_probs: FloatArray, sampling: Sampling) -> FloatArray:
    """Keep as few of the most probable tokens as reach the mass top_p; the lowest id first among equals."""
    return log_probs if sampling.top_p >= 1.0 else _nucleus(log_probs, -log_probs, sampling.top_p)


def _min_p(log_probs: FloatArray, sampling: Sampling) -> FloatArray:
    """Keep the tokens at least min_p times as probable as the most probable one."""
    if sampling.min_p <= 0.0:
        return log_probs
    return _keep(log_probs, log_probs >= log_probs.max(axis=-1, keepdims=True) + log(sampling.min_p))


def _typical_p(log_probs: FloatArray, sampling: Sampling) -> FloatArray:
    """Keep as few of the tokens with −log p nearest to the entropy as reach the mass typical_p.

    The lowest id first among equals. Source: Meister et al. 2022, arXiv:2202.00666.
    """
    if sampling.typical_p >= 1.0:
        return log_probs
    probs = exp(log_probs)
    negative_entropy = total(probs * np.where(probs > 0, log_probs, 0.0))
    return _nucleus(log_probs, np.abs(log_probs - negative_entropy), sampling.typical_p)


def _nucleus(log_probs: FloatArray, ranks: FloatArray, mass: float) -> FloatArray:
    """Keep as few of the tokens with the lowest ranks as reach `mass`; the lowest id first among equals.

    log_probs, ranks: (n, V) float64. Returns (n, V) float64, renormalised.
    """
    order = np.argsort(ranks, axis=-1, kind="stable")
    mass_up_to = running_total(exp(np.take_along_axis(log_probs, order, axis=-1)))
    # The first token is always kept; any other only if all before it fall short of the mass.
    falls_short = np.logical_and.accumulate(mass_up_to[:, :-1] < mass, axis=-1)
    kept_sorted = np.concatenate([np.ones((len(order), 1), np.bool_), falls_short], axis=-1)
    kept = np.zeros_like(kept_sorted)
    np.put_along_axis(kept, order, kept_sorted, axis=-1)
    return _keep(log_probs, kept)
