"""Heads that sample: siblings have the law of q without replacement, and what is accepted has the target's law."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from orchestrator.core.elementary import exp
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.static_trees import tree_of_choices
from orchestrator.core.types import Distribution
from orchestrator.sampling.accept import KeyedNoise, accept_rejection
from orchestrator.sampling.reference import dense_q
from orchestrator.sampling.sampled_drafts import check_q, sample_draft, sample_siblings
from runtime.heads.engines.medusa import MedusaEngine
from runtime.heads.engines.trees import in_sibling_order
from runtime.heads.modules.medusa import MedusaHeads
from tests.support.heads import draft, native_or_skip, request

VOCAB, WIDTH, NUM_SEEDS = 6, 16, 6000
CHOICES = tree_of_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0]])
#: Far below what any of the tests would see by chance; a wrong law gives less than 1e-20 at this number of seeds.
LEAST_P = 1e-5


@pytest.fixture(scope="module", params=["torch", "native"])
def answers(request: pytest.FixtureRequest) -> list[Any]:
    """The drafts of two heads for every seed."""
    generator = torch.Generator().manual_seed(0)
    heads = MedusaHeads(2, 0, torch.randn(VOCAB, WIDTH, generator=generator)).eval().requires_grad_(False)
    engine = MedusaEngine(heads, native_or_skip(heads) if request.param == "native" else None)
    state = 0.4 * torch.randn(1, WIDTH, generator=generator).numpy()
    return [answer for first in range(0, NUM_SEEDS, 200) for answer in draft(engine, *calls(state, first, 200))]


def calls(state: np.ndarray, first: int, count: int) -> list[Any]:
    return [
        request(
            [1, 2], state, sampling=Sampling(1.0, seed=seed, rule=Rule.REJECTION), sequence_id=seed + 1,
            choices=CHOICES, max_depth=2, draws=True,
        )
        for seed in range(first, first + count)
    ]  # fmt: skip


def p_value(counts: Counter[Any], law: dict[Any, float]) -> float:
    """Return how likely chance alone is to give counts so far from the law."""
    assert set(counts) <= set(law)
    total = sum(counts.values())
    observed, expected = zip(*((counts[key], total * share) for key, share in law.items()), strict=True)
    return float(stats.chisquare(observed, expected).pvalue)


def test_every_tree_has_the_shape_and_the_q_that_it_was_sampled_from(answers: list[Any]) -> None:
    for answer in answers[:200]:
        assert answer.tree.parents.tolist() == CHOICES.parents.tolist()
        check_q(answer.tree, answer.q, VOCAB)
        assert len(answer.q) == CHOICES.num_nodes


def test_siblings_are_sampled_from_q_without_replacement(answers: list[Any]) -> None:
    q = dict(zip(answers[0].q[0].ids.tolist(), answers[0].q[0].probs.tolist(), strict=True))
    pairs = {(first, second): q[first] * q[second] / (1.0 - q[first]) for first in q for second in q if first != second}
    assert p_value(Counter(answer.tree.tokens[0] for answer in answers), q) > LEAST_P
    assert p_value(Counter((answer.tree.tokens[0], answer.tree.tokens[1]) for answer in answers), pairs) > LEAST_P


def test_what_is_accepted_has_the_target_s_law(answers: list[Any]) -> None:
    p = exp(torch.randn(CHOICES.num_nodes + 1, VOCAB, generator=torch.Generator().manual_seed(3)).double().numpy())
    p[1:] = p[1]  # behind every first token the same law, so that the second one's is known
    p /= p.sum(axis=1, keepdims=True)
    first, second = Counter[int](), Counter[int]()
    for seed, answer in enumerate(answers):
        tree = answer.tree
        path, following = accept_rejection(tree, p, dense_q(tree, answer.q, VOCAB), 2, KeyedNoise(seed, 2))
        emitted = [*(int(tree.tokens[node - 1]) for node in path), following]
        first[emitted[0]] += 1
        if len(emitted) > 1:
            second[emitted[1]] += 1
    assert p_value(first, dict(enumerate(p[0].tolist()))) > LEAST_P
    assert p_value(second, dict(enumerate(p[1].tolist()))) > LEAST_P
    assert sum(second.values()) > NUM_SEEDS / 2


def test_a_shape_that_skips_ranks_gets_the_first_tokens_that_are_sampled() -> None:
    assert in_sibling_order(tree_of_choices([[3], [1], [3, 2], [3, 5]])).tokens.tolist() == [0, 1, 0, 1]


def test_the_first_of_several_siblings_is_the_one_that_is_sampled_alone() -> None:
    rng = np.random.default_rng(0)
    for seed in range(50):
        q = Distribution(np.arange(0, 20, 2, dtype=np.int32), rng.random(10).astype(np.float32))
        sampling = Sampling(1.0, seed=seed, rule=Rule.REJECTION)
        siblings = sample_siblings(q, 7, sampling, 5, 12).tolist()
        assert siblings[0] == sample_draft(q, 7, sampling, 5)
        assert sorted(siblings) == q.ids.tolist()
