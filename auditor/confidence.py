"""How wrong a server may still be after an audit that found nothing: bounds that hold with a stated confidence."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from orchestrator.core.arrays import FloatArray

CONFIDENCE = 0.99
#: Outcomes with a smaller expected count are merged for the G-test.
MIN_EXPECTED = 5.0


def max_error_rate(num_wrong: int, num_seen: int) -> float:
    """Return the highest rate of wrong steps that is compatible with the observed count, with CONFIDENCE.

    For num_wrong = 0 it is about −log(1 − CONFIDENCE) / n, the rule of three.
    Source: Clopper and Pearson 1934.
    """
    if num_wrong >= num_seen:
        return 1.0
    return float(stats.beta.ppf(CONFIDENCE, num_wrong + 1, num_seen - num_wrong))


def total_variation(counts: FloatArray, probs: FloatArray) -> float:
    """Return the total variation distance between observed frequencies and probabilities.

    counts: (k,) float64, observations per outcome. probs: (k,) float64, expected probability of each.
    """
    return float(np.abs(counts / counts.sum() - probs).sum() / 2)


def max_total_variation(counts: FloatArray, probs: FloatArray) -> float:
    """Return the greatest total variation distance from `probs` that fits the observed counts, with CONFIDENCE.

    P(|p̂ − p|₁ ≥ ε) ≤ (2^k − 2)·exp(−n ε² / 2) for k outcomes and n draws.
    counts, probs: (k,) float64, as for `total_variation`.
    Source: Weissman et al. 2003.
    """
    num_cells, num_draws = len(probs), counts.sum()
    log_cells = num_cells * math.log(2) + math.log1p(-(2.0 ** (1 - num_cells)))
    epsilon = math.sqrt(2 * (log_cells - math.log(1 - CONFIDENCE)) / num_draws)
    return min(1.0, total_variation(counts, probs) + epsilon / 2)


def g_test(counts: FloatArray, probs: FloatArray) -> float:
    """Return the p-value of a G-test, outcomes with an expected count below MIN_EXPECTED merged into one.

    counts, probs: (k,) float64, as for `total_variation`.
    """
    expected = probs * counts.sum()
    rare = expected < MIN_EXPECTED
    observed, expected = (np.append(cells[~rare], cells[rare].sum()) for cells in (counts, expected))
    kept = expected > 0
    if kept.sum() < 2:
        return 1.0
    return float(stats.power_divergence(observed[kept], expected[kept], lambda_="log-likelihood").pvalue)


def holm(p_values: Sequence[float], level: float) -> list[bool]:
    """Return which hypotheses are rejected if the probability of any false rejection is at most `level`.

    Source: Holm 1979.
    """
    rejected = [False] * len(p_values)
    for rank, index in enumerate(np.argsort(p_values).tolist()):
        if p_values[index] > level / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected
