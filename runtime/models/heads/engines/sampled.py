"""Sampled children of a candidate: their tokens, and the estimated acceptance of each before and after it is sampled.

docs/losslessness.md, Trees that are sampled while they grow, says why the estimates from before shape the tree.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from native.draws import sample_siblings
from native.sampling import sampler
from orchestrator.core.arrays import FloatArray, IdArray
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.types import Distribution

#: If the errors of q's logits are small, the probability that a second token sampled from q is accepted by the residual
#: max(p − q, 0): the mean of min(z⁺ / m, 1) for a standard normal z, where z⁺ = max(z, 0) and m is the mean of z⁺.
LATER_SHARE = 0.42


class Children(NamedTuple):
    """Guesses for the tokens after some candidates, in the order in which siblings are tried.

    ids: (n, k) int32. scores: (n, k) float64, the log-confidence of each token. bounds: (n, k) float64, upper bounds of
    the scores that are known before the tokens are sampled, and never rise along a row; equal to the scores if tokens
    are not sampled. Scores and bounds are −inf where q has no token left.
    """

    ids: IdArray
    scores: FloatArray
    bounds: FloatArray


def sampled_children(
    q: Distribution, position: int, sampling: Sampling, prefix_len: int, count: int, parent: int, sharpness: float
) -> Children:
    """Return up to `count` children of the candidate `parent`, sampled from q without replacement, as one row."""
    tokens = sample_siblings(q, position, sampling, prefix_len, count, parent)
    children = Children(np.full((1, count), -1, np.int32), *np.full((2, 1, count), -np.inf))
    children.ids[0, : len(tokens)] = tokens
    confidences = _confidences(q.probs, np.searchsorted(q.ids, tokens).tolist(), sharpness)
    children.scores[0, : len(tokens)], children.bounds[0, : len(tokens)] = sampler().log(confidences)
    return children


def _confidences(probs: FloatArray, sampled: list[int], sharpness: float) -> FloatArray:
    """Return the estimated probability that each token is the accepted child, and its bound, (2, k) float64.

    probs: (n,) float64, of q. sampled: the indices of the k sampled tokens in q.
    The first token y is assumed to be accepted with probability 1 − sharpness · (1 − q(y)): sharpness 1 gives EAGLE-2's
    confidence q(y), and 0 would mean that q is p. A later token is tried against the residual, which accepts it with a
    probability of at least LATER_SHARE at sharpness 0; at sharpness 1, the probability that it is reached and accepted
    is again q(y).
    """
    found = np.zeros((2, len(sampled)))
    order, is_sampled = np.argsort(-probs, kind="stable").tolist(), set[int]()
    left = 1.0  # the mass of q that has not been sampled
    missed = bound = 1.0  # the probability that no child has been accepted; the last bound
    for number, token in enumerate(sampled):
        best = float(probs[next(each for each in order if each not in is_sampled)])
        doubt = sharpness if number == 0 else 1.0 - (1.0 - sharpness) * LATER_SHARE
        bound = min(bound, missed * (1.0 - doubt + doubt * min(best / left, 1.0)))
        confidence = min(bound, missed * (1.0 - doubt + doubt * min(float(probs[token]) / left, 1.0)))
        found[:, number] = confidence, bound
        is_sampled.add(token)
        missed, left = missed - confidence, left - float(probs[token])
        if missed <= 0.0 or left <= 0.0:
            break
    return found
