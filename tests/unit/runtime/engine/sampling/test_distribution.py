"""The torch sampling against the numpy reference: mixed batches, every rule, ties, picks by the ten thousand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from auditor.reference import distribution as reference
from orchestrator.core.sampling_params import Sampling
from runtime.engine.sampling import distribution

RNG = np.random.default_rng(31)

# Every rule alone, at its edges, and all at once; in one batch each row must get its own.
MIXED = [
    Sampling(0.0),
    Sampling(1.0),
    Sampling(0.3),
    Sampling(1.7, top_k=1),
    Sampling(0.8, top_k=3),
    Sampling(0.8, top_k=10_000),
    Sampling(1.0, top_p=0.9),
    Sampling(1.0, top_p=1.0),
    Sampling(1.2, top_p=0.05),
    Sampling(1.0, top_p=0.999),
    Sampling(1.0, min_p=0.2),
    Sampling(2.0, min_p=1.0),
    Sampling(0.0, top_k=3, top_p=0.5, min_p=0.1),
    Sampling(0.7, top_k=20, top_p=0.9),
    Sampling(0.9, top_k=40, top_p=0.8, min_p=0.05),
    Sampling(1.5, top_p=0.7, min_p=0.3),
    Sampling(1.0, typical_p=0.5),
    Sampling(0.6, top_k=30, top_p=0.9, min_p=0.01, typical_p=0.8),
]


def boundary_distance(logits: np.ndarray, rules: Sampling) -> float:
    """How far the nearest keep-or-drop decision of one row is from a float tie, (V,) logits."""
    after_k = reference.log_p(logits[None], replace(rules, top_p=1.0, min_p=0.0, typical_p=1.0))[0]
    after_p = reference.log_p(logits[None], replace(rules, min_p=0.0, typical_p=1.0))[0]
    before_typical = reference.log_p(logits[None], replace(rules, typical_p=1.0))[0]
    distances = [1.0]
    if rules.top_p < 1.0:
        probs = np.sort(np.exp(after_k))[::-1]
        distances.append(np.abs(probs.cumsum() - probs - rules.top_p).min())
    if rules.min_p > 0.0:
        below = after_p.max() - after_p[np.isfinite(after_p)]
        distances.append(np.abs(below[below > 0.0] + np.log(rules.min_p)).min(initial=1.0))
    if rules.typical_p < 1.0:
        log_probs = before_typical[np.isfinite(before_typical)]
        ranks = np.abs(log_probs - (np.exp(log_probs) * log_probs).sum())
        probs = np.exp(log_probs)[ranks.argsort()]
        distances += [np.abs(probs.cumsum() - probs - rules.typical_p).min(), np.diff(np.sort(ranks)).min(initial=1.0)]
    return float(min(distances))


def check_rows(logits: np.ndarray, rules: list[Sampling]) -> int:
    """Compare log p of a mixed batch with the reference's, row by row; return how many rows were far from ties."""
    ours = distribution.log_p(torch.from_numpy(logits), rules).numpy()
    assert ours.dtype == np.float64
    checked = 0
    for row, own, rule in zip(logits, ours, rules, strict=True):
        if boundary_distance(row, rule) < 1e-9:
            continue
        truth = reference.log_p(row[None], rule)[0]
        assert (np.isfinite(own) == np.isfinite(truth)).all(), rule
        kept = np.isfinite(truth)
        assert np.abs(own[kept] - truth[kept]).max() <= 1e-12, rule
        checked += 1
    return checked


def test_top_p_keeps_the_lowest_ids_among_equals() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
    kept = distribution.log_p(logits, [Sampling(1.0, top_p=0.4)]).isfinite()
    assert kept.tolist() == [[False, True, False, True, False, False]]


def test_top_k_keeps_all_that_tie_with_the_last() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.0, 2.0, 1.0, 1.0]], dtype=torch.float64)
    kept = distribution.log_p(logits, [Sampling(1.0, top_k=2)]).isfinite()
    assert kept.tolist() == [[False, True, False, True, True, True]]


def test_a_row_without_top_p_loses_nothing_beside_one_with_it() -> None:
    """The sums of a long flat row pass 1 by rounding; top_p 1 must not cut its tail for that."""
    logits = torch.zeros(2, 50_000, dtype=torch.float64)
    log_p = distribution.log_p(logits, [Sampling(1.0), Sampling(1.0, top_p=0.90001)])
    assert log_p.isfinite().sum(dim=-1).tolist() == [50_000, 45_001]


def test_top_p_that_is_reached_exactly_keeps_no_more() -> None:
    """Halves and quarters are exact in binary, so this boundary is no matter of rounding."""
    logits = torch.zeros(2, 4, dtype=torch.float64)
    logits[0, 2:] = -torch.inf
    for top_p, kept in ((0.5, [1, 2]), (0.75, [2, 3])):
        rules = [Sampling(1.0, top_p=top_p)] * 2
        assert distribution.log_p(logits, rules).isfinite().sum(dim=-1).tolist() == kept
        truth = reference.log_p(logits.numpy(), rules[0])
        assert np.isfinite(truth).sum(axis=-1).tolist() == kept


def test_picks_use_all_digits_of_float64_logits() -> None:
    logits = torch.ones(40, 30, dtype=torch.float64)
    logits[:, 17] += 1e-10
    rules = [Sampling(temperature, top_k=1, seed=row) for row in range(20) for temperature in (0.0, 1.0)]
    assert distribution.target_tokens(logits, list(range(40)), rules) == [17] * 40


drawn_rules = st.builds(
    Sampling,
    temperature=st.floats(0.05, 3.0),
    top_k=st.one_of(st.just(0), st.integers(0, 30)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    typical_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 25), st.lists(drawn_rules, min_size=1, max_size=6))
def test_log_p_equals_the_reference_where_logits_tie(seed: int, vocab_size: int, rules: list[Sampling]) -> None:
    """Few distinct logits, so that top-k and top-p cut through groups of equals."""
    levels = np.random.default_rng(seed).integers(-3, 4, (len(rules), vocab_size))
    check_rows(levels / 2.0, rules)


@pytest.mark.parametrize("vocab_size", [7, 300, 3000])
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_log_p_of_a_mixed_batch_equals_the_reference(vocab_size: int, spread: float) -> None:
    """Flat rows need more than the first guess of a nucleus, peaked ones a single token."""
    rules = [rule for rule in MIXED if not rule.greedy] * 4
    logits = RNG.normal(0.0, spread, (len(rules), vocab_size))
    assert check_rows(logits, rules) >= len(rules) - 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "rows_each"), [(40, 650), (700, 20)])
def test_picks_equal_the_reference_s(dtype: torch.dtype, vocab_size: int, rows_each: int) -> None:
    """Greedy and drawn rows in one batch, shuffled; bfloat16 logits tie often."""
    logits = torch.from_numpy(RNG.normal(0.0, 2.0, (len(MIXED), rows_each, vocab_size))).to(dtype)
    positions = RNG.integers(0, 2**20, (len(MIXED), rows_each))
    rules = [replace(rule, seed=int(RNG.integers(2**63)) * 2 + 1) for rule in MIXED]
    truth = np.stack(
        [
            reference.sample(rows.double().numpy(), places, rule)
            for rows, places, rule in zip(logits, positions, rules, strict=True)
        ]
    ).ravel()
    order = RNG.permutation(len(truth))
    ours = distribution.target_tokens(
        logits.flatten(0, 1)[torch.from_numpy(order)],
        positions.ravel()[order].tolist(),
        [rules[index // rows_each] for index in order],
    )
    assert (np.array(ours) == truth[order]).all()


def test_greedy_picks_take_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(3, 500)
    logits[1, [77, 300]] = 1.0
    logits[2, 499] = 1.0
    assert distribution.target_tokens(logits, [5, 6, 7], [Sampling()] * 3) == [0, 77, 499]


def test_log_probs_of_are_the_model_s_own() -> None:
    """Raw logits, before temperature and truncation."""
    logits = RNG.normal(0.0, 4.0, (20, 90))
    tokens = RNG.integers(0, 90, 20)
    ours = distribution.log_probs_of(torch.from_numpy(logits).float(), tokens.tolist())
    truth = reference.log_softmax(logits.astype(np.float32).astype(np.float64))
    assert np.abs(np.array(ours) - truth[np.arange(20), tokens]).max() <= 1e-12
