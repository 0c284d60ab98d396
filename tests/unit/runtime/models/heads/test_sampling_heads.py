"""Heads that sample: siblings have the law of q without replacement, and what is accepted has the target's law."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from auditor.reference.decoding import dense_q
from auditor.reference.elementary import exp
from auditor.reference.rules import KeyedNoise, accept_rejection
from native.draws import sample_draft, sample_siblings
from orchestrator.core.sampled_drafts import check_q
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.static_trees import tree_of_choices
from orchestrator.core.types import Distribution
from runtime.models.heads.engines.medusa import MedusaEngine
from runtime.models.heads.engines.redrafter import RedrafterEngine
from runtime.models.heads.engines.trees import in_sibling_order
from runtime.models.heads.modules.medusa import MedusaHeads
from runtime.models.heads.modules.redrafter import RedrafterHead
from tests.support.heads import draft, native_or_skip, request

WIDTH, NUM_SEEDS, FEWER_SEEDS = 16, 6000, 2000
VOCAB = {"medusa": 6, "redrafter": 16}
CHOICES = tree_of_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0]])
SHAPES: dict[str, dict[str, Any]] = {"medusa": {"choices": CHOICES}, "redrafter": {"width": 3, "sharpness": 0.5}}
#: Far below what any of the tests would see by chance; a wrong law gives less than 1e-20 at this number of seeds.
LEAST_P = 1e-5


def engine_of(kind: str, native: bool) -> Any:
    """A head of two levels with random weights."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(VOCAB[kind], WIDTH, generator=generator)
    head: Any
    if kind == "medusa":
        head = MedusaHeads(2, 0, table).eval().requires_grad_(False)
        return MedusaEngine(head, native_or_skip(head) if native else None)
    torch.manual_seed(1)
    head = RedrafterHead(table, 0, 2 * WIDTH, rnn=False).eval().requires_grad_(False)
    return RedrafterEngine(head, native_or_skip(head) if native else None)


@pytest.fixture(
    scope="module",
    params=[("medusa", False), ("medusa", True), ("redrafter", False), ("redrafter", True)],
    ids=lambda param: f"{param[0]}-{'native' if param[1] else 'torch'}",
)
def drafted(request: pytest.FixtureRequest) -> tuple[str, list[Any]]:
    """A kind of head, static and dynamic, and its drafts for every seed."""
    kind, native = request.param
    engine = engine_of(kind, native)
    state = 0.4 * torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(2)).numpy()
    firsts = range(0, NUM_SEEDS if native else FEWER_SEEDS, 200)
    return kind, [answer for first in firsts for answer in draft(engine, *calls(SHAPES[kind], state, first, 200))]


@pytest.fixture
def answers(drafted: tuple[str, list[Any]]) -> list[Any]:
    return drafted[1]


def calls(shape: dict[str, Any], state: np.ndarray, first: int, count: int) -> list[Any]:
    return [
        request(
            [1, 2], state, sampling=Sampling(1.0, seed=seed, rule=Rule.REJECTION), sequence_id=seed + 1,
            max_depth=2, max_nodes=6, draws=True, **shape,
        )
        for seed in range(first, first + count)
    ]  # fmt: skip


def p_value(counts: Counter[Any], law: dict[Any, float]) -> float:
    """Return how likely chance alone is to give counts so far from the law."""
    assert set(counts) <= set(law)
    total = sum(counts.values())
    observed, expected = zip(*((counts[key], total * share) for key, share in law.items()), strict=True)
    return float(stats.chisquare(observed, expected).pvalue)


def test_every_tree_has_the_shape_and_the_q_that_it_was_sampled_from(drafted: tuple[str, list[Any]]) -> None:
    kind, answers = drafted
    for answer in answers[:200]:
        check_q(answer.tree, answer.q, VOCAB[kind])
        assert len(answer.q) == answer.tree.num_nodes == 6
        assert kind != "medusa" or answer.tree.parents.tolist() == CHOICES.parents.tolist()
    assert kind == "medusa" or len({tuple(answer.tree.parents.tolist()) for answer in answers[:200]}) > 5


def test_siblings_are_sampled_from_q_without_replacement(answers: list[Any]) -> None:
    q = dict(zip(answers[0].q[0].ids.tolist(), answers[0].q[0].probs.tolist(), strict=True))
    pairs = {(first, second): q[first] * q[second] / (1.0 - q[first]) for first in q for second in q if first != second}
    firsts = [list(answer.tree.children[0])[:2] for answer in answers]
    assert p_value(Counter(each[0] for each in firsts), q) > LEAST_P
    if all(len(each) == 2 for each in firsts):  # in a dynamic tree the second place may be below the first token's
        assert p_value(Counter((first, second) for first, second in firsts), pairs) > LEAST_P


def test_what_is_accepted_has_the_target_s_law(drafted: tuple[str, list[Any]]) -> None:
    kind, answers = drafted
    p = exp(torch.randn(7, VOCAB[kind], generator=torch.Generator().manual_seed(3)).double().numpy())
    p[1:] = p[1]  # after every first token the same law, so that the second one's is known
    p /= p.sum(axis=1, keepdims=True)
    first, second = Counter[int](), Counter[int]()
    for seed, answer in enumerate(answers):
        tree = answer.tree
        path, following = accept_rejection(tree, p, dense_q(tree, answer.q, VOCAB[kind]), 2, KeyedNoise(seed, 2))
        emitted = [*(int(tree.tokens[node - 1]) for node in path), following]
        first[emitted[0]] += 1
        if len(emitted) > 1:
            second[emitted[1]] += 1
    assert p_value(first, dict(enumerate(p[0].tolist()))) > LEAST_P
    assert p_value(second, dict(enumerate(p[1].tolist()))) > LEAST_P
    assert sum(second.values()) > len(answers) / 2


def test_a_shape_that_skips_ranks_gets_the_first_tokens_that_are_sampled() -> None:
    assert in_sibling_order(tree_of_choices([[3], [1], [3, 2], [3, 5]])).tokens.tolist() == [0, 1, 0, 1]


def test_the_children_of_two_nodes_are_independent() -> None:
    q = Distribution(np.arange(4, dtype=np.int32), np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    samplings = [Sampling(1.0, seed=seed, rule=Rule.REJECTION) for seed in range(2000)]
    pairs = Counter(tuple(int(sample_siblings(q, 7, each, 5, 1, node)[0]) for node in (1, 2)) for each in samplings)
    law = {(one, other): float(q.probs[one] * q.probs[other]) for one in range(4) for other in range(4)}
    assert p_value(pairs, law) > LEAST_P


def test_the_first_of_several_siblings_is_the_one_that_is_sampled_alone() -> None:
    rng = np.random.default_rng(0)
    for seed in range(50):
        q = Distribution(np.arange(0, 20, 2, dtype=np.int32), rng.random(10).astype(np.float32))
        sampling = Sampling(1.0, seed=seed, rule=Rule.REJECTION)
        siblings = sample_siblings(q, 7, sampling, 5, 12).tolist()
        assert siblings[0] == sample_draft(q, 7, sampling, 5)
        assert sorted(siblings) == q.ids.tolist()
