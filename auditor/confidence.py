"""How wrong a server may be whose audit found nothing: bounds that hold with a stated confidence."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from orchestrator.core.types import FloatArray

CONFIDENCE = 0.99
MIN_EXPECTED = 5.0


def max_error_rate(num_wrong: int, num_seen: int, confidence: float = CONFIDENCE) -> float:
    """Return the highest rate of wrong steps that such a count leaves likely (Clopper and Pearson 1934).

    For none wrong it is −log(1 − confidence) / n, the rule of three.
    """
    if num_wrong >= num_seen:
        return 1.0
    return float(stats.beta.ppf(confidence, num_wrong + 1, num_seen - num_wrong))


def total_variation(counts: FloatArray, law: FloatArray) -> float:
    """Return the total total_variation between what was counted and the law; both (k,)."""
    return float(np.abs(counts / counts.sum() - law).sum() / 2)


def max_total_variation(counts: FloatArray, law: FloatArray, confidence: float = CONFIDENCE) -> float:
    """Return how far in total total_variation the server's own law may be from `law`.

    P(|p̂ − p|₁ ≥ ε) ≤ (2^k − 2)·exp(−n ε² / 2) for k cells and n draws (Weissman et al. 2003).
    """
    num_cells, num_draws = len(law), counts.sum()
    log_cells = num_cells * math.log(2) + math.log1p(-(2.0 ** (1 - num_cells)))
    reach = math.sqrt(2 * (log_cells - math.log(1 - confidence)) / num_draws)
    return min(1.0, total_variation(counts, law) + reach / 2)


def g_test(counts: FloatArray, law: FloatArray) -> float:
    """Return the p-value of a G-test; cells that expect fewer than MIN_EXPECTED draws are one."""
    expected = law * counts.sum()
    rare = expected < MIN_EXPECTED
    seen, due = (np.append(cells[~rare], cells[rare].sum()) for cells in (counts, expected))
    kept = due > 0
    if kept.sum() < 2:
        return 1.0
    return float(stats.power_divergence(seen[kept], due[kept], lambda_="log-likelihood").pvalue)


def holm(p_values: Sequence[float], level: float) -> list[bool]:
    """Return which hypotheses fall when the chance of one false alarm in all is at most `level` (Holm 1979)."""
    fallen = [False] * len(p_values)
    for rank, index in enumerate(np.argsort(p_values).tolist()):
        if p_values[index] > level / (len(p_values) - rank):
            break
        fallen[index] = True
    return fallen
