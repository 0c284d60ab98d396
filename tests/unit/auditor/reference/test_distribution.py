"""From logits to p: each rule by hand, and the law of the pick."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from auditor.reference.distribution import log_p, sample
from orchestrator.core.sampling_params import Sampling

P = np.array([[0.4, 0.3, 0.15, 0.1, 0.05]])
LOGITS = np.log(P) + 3.0


def kept(sampling: Sampling) -> list[float]:
    return [round(float(x), 6) for x in np.exp(log_p(LOGITS, sampling))[0]]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(1.0), [0.4, 0.3, 0.15, 0.1, 0.05]),
        (Sampling(0.0), [1, 0, 0, 0, 0]),
        (Sampling(1.0, top_k=2), [0.571429, 0.428571, 0, 0, 0]),
        (Sampling(1.0, top_p=0.7), [0.571429, 0.428571, 0, 0, 0]),
        (Sampling(1.0, top_p=0.701), [0.470588, 0.352941, 0.176471, 0, 0]),
        (Sampling(1.0, top_p=1e-9), [1, 0, 0, 0, 0]),
        (Sampling(1.0, min_p=0.3), [0.470588, 0.352941, 0.176471, 0, 0]),
        # The entropy is 1.39: the surprises 0.92, 1.20, 1.90, 2.30, 3.00 lie 0.47, 0.19, 0.50, 0.91, 1.60 from it.
        (Sampling(1.0, typical_p=0.2), [0, 1, 0, 0, 0]),
        (Sampling(1.0, typical_p=0.31), [0.571429, 0.428571, 0, 0, 0]),
        (Sampling(1.0, typical_p=0.71), [0.470588, 0.352941, 0.176471, 0, 0]),
        (Sampling(1.0, top_k=99), [0.4, 0.3, 0.15, 0.1, 0.05]),
        (Sampling(1.0, top_k=3, top_p=0.8), [0.571429, 0.428571, 0, 0, 0]),
    ],
)
def test_rules_keep_what_they_should(sampling: Sampling, expected: list[float]) -> None:
    assert kept(sampling) == expected


def test_temperature_flattens_and_sharpens() -> None:
    expected = P**2 / (P**2).sum()
    assert np.allclose(np.exp(log_p(LOGITS, Sampling(0.5))), expected, atol=1e-12)


def test_top_k_keeps_ties_and_top_p_prefers_the_lowest_id() -> None:
    flat = np.zeros((1, 4))
    assert np.isfinite(log_p(flat, Sampling(1.0, top_k=2))).sum() == 4
    assert np.isfinite(log_p(flat, Sampling(1.0, top_p=0.5)))[0].tolist() == [True, True] + [False] * 2


def test_greedy_pick_takes_the_lowest_id_of_a_tie() -> None:
    assert sample(np.array([[1.0, 2.0, 2.0]]), np.array([7]), Sampling()).tolist() == [1]


def test_pick_has_the_distribution_p() -> None:
    """χ² over 200,000 positions of one seed: the Gumbel argmax draws from p."""
    num_draws = 200_000
    sampling = Sampling(0.8, top_p=0.97, seed=2024)
    target_tokens = sample(np.repeat(LOGITS, num_draws, axis=0), np.arange(num_draws), sampling)
    p = np.exp(log_p(LOGITS, sampling))[0]
    observed = np.bincount(target_tokens, minlength=5)
    assert observed[p == 0].sum() == 0
    assert stats.chisquare(observed[p > 0], num_draws * p[p > 0]).pvalue > 1e-3
