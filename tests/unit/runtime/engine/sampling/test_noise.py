"""The torch noise against the numpy reference: the same bits for every key, the same Gumbel up to the last digits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from auditor.reference import noise as reference
from orchestrator.core.noise import Stream
from runtime.engine.sampling import noise

CPU = torch.device("cpu")
EDGE_SEEDS = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
EDGE_POSITIONS = [0, 1, 2**16, 2**31 - 1, 2**31]

seeds = st.one_of(st.sampled_from(EDGE_SEEDS), st.integers(0, 2**64 - 1))
positions = st.one_of(st.sampled_from(EDGE_POSITIONS), st.integers(0, 2**31))
rows = st.lists(st.tuples(seeds, positions), min_size=1, max_size=5)
token_ids = st.lists(st.integers(0, 250_000), min_size=1, max_size=20)


def torch_rows(draw: object, rows: list[tuple[int, int]], tokens: np.ndarray, *key: int) -> np.ndarray:
    """One row per (seed, position), all tokens in every row."""
    words = noise.seed_words([seed for seed, _ in rows], CPU)
    places = torch.tensor([[position] for _, position in rows])
    return draw(words, places, torch.from_numpy(tokens), *key).numpy()  # type: ignore[operator]


def numpy_rows(draw: object, rows: list[tuple[int, int]], tokens: np.ndarray, *key: int) -> np.ndarray:
    return np.stack([draw(seed, position, tokens, *key) for seed, position in rows])  # type: ignore[operator]


@settings(max_examples=100, deadline=None)
@given(rows, token_ids, st.sampled_from(Stream), st.one_of(st.just(0), st.integers(0, 2**31)))
def test_uniform_has_the_reference_s_bits(
    rows: list[tuple[int, int]], tokens: list[int], stream: Stream, epoch: int
) -> None:
    ids = np.array(tokens)
    ours = torch_rows(noise.uniform, rows, ids, stream, epoch)
    truth = numpy_rows(reference.uniform, rows, ids, stream, epoch)
    assert ours.dtype == truth.dtype == np.float64
    assert (ours.view(np.int64) == truth.view(np.int64)).all()


@pytest.mark.parametrize("seed", [1, 2**64 - 1])
def test_uniform_has_the_reference_s_bits_over_a_whole_vocabulary(seed: int) -> None:
    tokens = np.arange(250_001)
    ours = torch_rows(noise.uniform, [(seed, 2**31)], tokens, Stream.TARGET)
    assert (ours == reference.uniform(seed, 2**31, tokens, Stream.TARGET)).all()


def test_uniform_may_be_asked_for_scattered_tokens_of_many_rows_at_once() -> None:
    """As `sampling` asks for it: one flat list of (row, token), the key words beside each."""
    low, high = noise.seed_words(EDGE_SEEDS, CPU)
    row = torch.tensor([7, 0, 7, 3, 5])
    token = torch.tensor([9, 9, 249_999, 0, 17])
    ours = noise.uniform((low[row, 0], high[row, 0]), row + 100, token, Stream.TARGET)
    truth = [
        reference.uniform(EDGE_SEEDS[r], r + 100, t, Stream.TARGET)
        for r, t in zip(row.tolist(), token.tolist(), strict=True)
    ]
    assert ours.tolist() == truth


def test_gumbel_is_the_reference_s_within_4_ulp() -> None:
    """Two logarithms, each within an ulp. Near its zero g inherits the *absolute* error of the outer one's
    argument near 1, so there an ulp of 1 is meant."""
    rows = [(seed, 11 * i) for i, seed in enumerate(EDGE_SEEDS)]
    tokens = np.arange(20_000)
    ours = torch_rows(noise.gumbel, rows, tokens)
    truth = numpy_rows(reference.gumbel, rows, tokens)
    ulps = np.abs(ours - truth) / np.spacing(np.maximum(np.abs(truth), 1.0))
    assert ulps.max() <= 4.0
