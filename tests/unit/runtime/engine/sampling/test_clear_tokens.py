"""Tokens that few operations decide clearly are those of the definition, and where rounding might decide, it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from orchestrator.core.noise import gumbel
from orchestrator.core.sampling.distribution import sample
from orchestrator.core.sampling_params import Sampling
from runtime.engine.sampling import clear_tokens as module
from runtime.engine.sampling import distribution
from runtime.engine.sampling.clear_tokens import UNCLEAR, clear_tokens
from runtime.engine.sampling.distribution import target_tokens
from tests.support.launches import count

SAMPLINGS = (
    Sampling(), Sampling(1.0), Sampling(0.4), Sampling(0.8, top_k=40), Sampling(0.8, top_k=1), Sampling(1.0, top_p=0.9),
    Sampling(1.3, top_p=0.3), Sampling(1.0, min_p=0.1), Sampling(0.8, top_k=30, top_p=0.8), Sampling(0.0, top_k=2),
    Sampling(1.1, top_k=50, min_p=0.02), Sampling(0.9, top_k=20, top_p=0.9, min_p=0.05), Sampling(1.2, top_k=10_000),
)  # fmt: skip


def rows(rng: np.random.Generator, number: int, vocab_size: int) -> tuple[Tensor, list[int], list[Sampling]]:
    """Random logits, positions, and samplings with seeds of 64 bits, in turn."""
    logits = torch.from_numpy(rng.normal(0.0, 3.0, (number, vocab_size)))
    seeds = rng.integers(2**64, size=number, dtype=np.uint64).tolist()
    samplings = [replace(SAMPLINGS[row % len(SAMPLINGS)], seed=seed) for row, seed in enumerate(seeds)]
    return logits, rng.integers(2**31, size=number).tolist(), samplings


def truth(logits: Tensor, positions: Sequence[int], samplings: Sequence[Sampling]) -> list[int]:
    given = zip(logits.double().numpy(), positions, samplings, strict=True)
    return [int(sample(row[None], np.array([at]), own)[0]) for row, at, own in given]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [2, 50, 3000])
def test_tokens_of_a_mixed_batch_are_clear_and_the_reference_s(dtype: torch.dtype, vocab_size: int) -> None:
    """bfloat16 logits often tie exactly, also where a truncation ends."""
    logits, positions, samplings = rows(np.random.default_rng(vocab_size), 260, vocab_size)
    found = clear_tokens(logits.to(dtype), positions, samplings)
    assert found == truth(logits.to(dtype), positions, samplings)


def test_a_token_does_not_depend_on_the_other_rows() -> None:
    logits, positions, samplings = rows(np.random.default_rng(1), 39, 100)
    together = clear_tokens(logits, positions, samplings)
    assert together == [
        clear_tokens(logits[row : row + 1], [positions[row]], [samplings[row]])[0] for row in range(len(logits))
    ]


def test_one_token_of_a_vocabulary_of_one_is_clear() -> None:
    assert clear_tokens(torch.zeros(2, 1), [0, 1], [Sampling(1.0), Sampling(1.0, top_p=0.5)]) == [0, 0]


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(1.0, top_p=0.95), Sampling(1.0, top_k=30)])
def test_scores_that_rounding_orders_are_left_to_the_definition(sampling: Sampling) -> None:
    """The logits cancel the noise: the best scores of a row differ by little more than its rounding, or not at all."""
    rng, vocab_size, number = np.random.default_rng(7), 40, 400
    samplings = [replace(sampling, seed=seed) for seed in range(number)]
    noise = np.stack([gumbel(seed, 5, np.arange(vocab_size)) for seed in range(number)])
    logits = torch.from_numpy(rng.normal(0.0, 10.0 ** rng.uniform(-17, -12, (number, 1)), noise.shape) - noise)
    positions = [5] * number
    assert set(clear_tokens(logits, positions, samplings)) == {UNCLEAR}
    assert target_tokens(logits, positions, samplings) == truth(logits, positions, samplings)


def boundary(sampling: Sampling, probs: Sequence[float]) -> set[int]:
    """The results for one distribution under many seeds; `target_tokens` gives the reference's tokens."""
    samplings = [replace(sampling, seed=seed) for seed in range(50)]
    logits = torch.from_numpy(np.log(np.array([probs] * 50)))
    assert target_tokens(logits, [3] * 50, samplings) == truth(logits, [3] * 50, samplings)
    return set(clear_tokens(logits, [3] * 50, samplings))


def test_a_truncation_that_rounding_might_move_is_left_to_the_definition() -> None:
    near = 1.0 + 1e-11
    for sampling, probs in (
        (Sampling(1.0, top_k=2), [0.5, 0.25 * near, 0.25, 1e-9]),
        (Sampling(1.0, top_p=0.75), [0.5, 0.25, 0.125, 0.125]),
        (Sampling(1.0, top_k=3, top_p=0.8), [0.4, 0.4, 0.2, 0.1]),
        (Sampling(1.0, min_p=0.5), [0.5 * near, 0.25, 0.25]),
    ):
        assert boundary(sampling, probs) == {UNCLEAR}, sampling
    # The same with nothing near the boundary.
    for sampling, probs in (
        (Sampling(1.0, top_k=2), [0.5, 0.25, 0.25, 1e-9]),
        (Sampling(1.0, top_p=0.76), [0.5, 0.25, 0.125, 0.125]),
        (Sampling(1.0, min_p=0.4), [0.5, 0.25, 0.25]),
    ):
        assert UNCLEAR not in boundary(sampling, probs), sampling


def test_rows_that_a_shortlist_does_not_hold_are_left_to_the_definition() -> None:
    """Equals at its end too: it holds any of them, not those with the lowest ids."""
    vocab_size = module.SHORTLIST + 500
    flat, stepped = torch.zeros(vocab_size), torch.zeros(vocab_size)
    stepped[: module.SHORTLIST - 10] = 5.0
    few = stepped.clone()
    few[: module.SHORTLIST] = 5.0
    logits = torch.stack([flat, flat, stepped, few, few])
    samplings = [
        Sampling(1.0, top_p=0.9, seed=1), Sampling(1.0, top_k=module.SHORTLIST, seed=2), Sampling(1.0, top_p=0.999),
        Sampling(1.0, top_p=0.99, seed=3), Sampling(1.0, typical_p=0.5),
    ]  # fmt: skip
    assert clear_tokens(logits, [9] * 5, samplings) == [UNCLEAR] * 5
    assert target_tokens(logits, [9] * 5, samplings) == truth(logits, [9] * 5, samplings)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_rows_that_are_no_distribution_are_left_to_the_definition(value: float) -> None:
    logits = torch.zeros(2, 5)
    logits[:, 2] = value
    assert clear_tokens(logits, [0, 0], [Sampling(1.0), Sampling(1.0, top_p=0.5)]) == [UNCLEAR] * 2


def test_forbidden_tokens_are_never_found() -> None:
    logits = torch.full((3, 9), -torch.inf)
    logits[:, 4] = logits[2, 6] = -1e30
    samplings = [Sampling(1.0), Sampling(1.0, top_k=5), Sampling(1.0, top_p=0.99, min_p=0.1)]
    found = clear_tokens(logits, [1] * 3, samplings)
    assert found[:2] == [4, 4] and found == truth(logits, [1] * 3, samplings)


def test_tokens_take_few_operations_and_one_wait_whatever_the_batch() -> None:
    """Every operation is a launch on a GPU; the definition takes some 400 for a temperature alone."""
    logits, positions, samplings = rows(np.random.default_rng(3), 26, 300)
    for number in (26, 13):
        given = logits[:number], positions[:number], samplings[:number]
        few = count(lambda given=given: distribution.target_tokens(*given))  # type: ignore[misc]
        assert few.waits == few.copies == 1 and few.ops < 250
    assert few.ops == count(lambda: distribution.target_tokens(logits, positions, samplings)).ops
