"""Trees that are sampled while they grow, enumerated exactly: what is accepted of them has the target's law."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from auditor.reference.rules import accept_block, accept_rejection
from orchestrator.core.arrays import FloatArray
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.types import Distribution
from runtime.models.heads.engines import sampled
from runtime.models.heads.engines.sampled import sampled_children
from runtime.models.heads.engines.trees import DynamicTree
from tests.support.enumeration import Branch, law

EXACT = 1e-12
SAMPLING = Sampling(1.0, rule=Rule.REJECTION)
Table = Callable[[Sequence[int]], FloatArray]


def table(vocab_size: int, seed: int, reads: int = 2) -> Table:
    """A language: prefix → distribution, fixed by its last `reads` tokens; 64ths, which float32 holds exactly."""

    @cache
    def found(recent: tuple[int, ...]) -> FloatArray:
        rng = np.random.default_rng([seed, *(token + 1 for token in recent)])
        return (1 + rng.multinomial(64 - vocab_size, rng.dirichlet(np.full(vocab_size, 0.5)))) / 64

    return lambda prefix: found(tuple(prefix[max(len(prefix) - reads, 0) :]))


@dataclass(frozen=True)
class Growth:
    """How trees grow. ranks_by_token: the tree holds the best tokens, as EAGLE-2's does, not those with the highest bounds.

    shares_noise: candidates of one level with the same q get the same children.
    """

    width: int
    max_nodes: int
    depth: int
    sharpness: float = 1.0
    min_prob: float = 0.0
    beam_search: bool = False
    ranks_by_token: bool = False
    shares_noise: bool = False


def grown(growth: Growth, branch: Branch, q: Table, monkeypatch: pytest.MonkeyPatch) -> DynamicTree:
    """Grow a tree below an empty prefix, each draw one of the branch's choices."""
    drawn: dict[Any, list[int]] = {}

    def draw(q: Distribution, position: int, sampling: Sampling, prefix_len: int, count: int, parent: int) -> Any:
        key = (position, q.probs.tobytes()) if growth.shares_noise else parent
        if key not in drawn:
            left, drawn[key] = q.probs.copy(), []
            while len(drawn[key]) < count and left.sum() > 0:
                drawn[key].append(branch.choose(left))
                left[drawn[key][-1]] = 0.0
        return q.ids[drawn[key]]

    monkeypatch.setattr(sampled, "sample_siblings", draw)
    min_score = math.log(growth.min_prob) if growth.min_prob else -math.inf
    tree = DynamicTree(growth.width, growth.max_nodes, growth.depth, growth.beam_search, min_score)
    while tree.frontier:
        rows = [
            sampled_children(
                distribution(q(tokens(tree, node))), tree.depth, SAMPLING, 0, tree.fan_out, node, growth.sharpness
            )
            for node in tree.frontier
        ]
        ids, scores, bounds = (np.concatenate(arrays) for arrays in zip(*rows, strict=True))
        tree.add_children(ids, scores, None if growth.ranks_by_token else bounds)
    return tree


def distribution(probs: FloatArray) -> Distribution:
    return Distribution(np.arange(len(probs), dtype=np.int32), probs.astype(np.float32))


def tokens(tree: DynamicTree, node: int) -> list[int]:
    return [tree.tokens[each] for each in tree.path(node)]


def emitted_law(
    growth: Growth, p: Table, q: Table, monkeypatch: pytest.MonkeyPatch, rule: Rule = Rule.REJECTION
) -> Any:
    """The law of what one step emits, over all drafts and decisions."""

    def step(branch: Branch) -> tuple[int, ...]:
        tree = grown(growth, branch, q, monkeypatch)
        drafted = tree.token_tree()
        rows = [[], *(tokens(tree, node) for node in tree.drafted())]
        p_rows, q_rows = np.array([p(row) for row in rows]), np.array([distribution(q(row)).probs for row in rows])
        accept = accept_block if rule is Rule.BLOCK else accept_rejection
        path, following = accept(drafted, p_rows, q_rows, 0, branch)
        return (*(int(drafted.tokens[node - 1]) for node in path), following)

    return law(step)


def error(growth: Growth, p: Table, q: Table, monkeypatch: pytest.MonkeyPatch, rule: Rule = Rule.REJECTION) -> float:
    """Return by how much the law of a token, given those that the step emits before it, is off the target's at most."""
    following: dict[tuple[int, ...], FloatArray] = {}
    for emitted, probability in emitted_law(growth, p, q, monkeypatch, rule).items():
        for place, token in enumerate(emitted):
            row = following.setdefault(emitted[:place], np.zeros(len(p([]))))
            row[token] += probability
    return max(float(np.abs(row / row.sum() - p(prefix)).max()) for prefix, row in following.items())


def test_with_sharpness_1_a_score_is_the_paper_s_confidence() -> None:
    q = distribution(np.array([10, 4, 32, 2, 16]) / 64)
    children = sampled_children(q, 3, replace(SAMPLING, seed=7), 3, 5, 0, 1.0)
    drawn, left = children.ids[0], q.probs.copy()
    assert np.exp(children.scores[0]) == pytest.approx(q.probs[drawn], abs=EXACT)
    for token, bound in zip(drawn.tolist(), np.exp(children.bounds[0]).tolist(), strict=True):
        assert bound == pytest.approx(left.max(), abs=EXACT)
        left[token] = 0.0


@pytest.mark.parametrize("sharpness", [0.01, 0.2, 0.7, 1.0])
def test_bounds_never_rise_and_no_token_scores_above_its_bound(sharpness: float) -> None:
    rng = np.random.default_rng(0)
    for seed in range(200):
        q = distribution(rng.dirichlet(np.full(12, rng.choice([0.05, 0.5, 5.0]))) + 1e-9)
        children = sampled_children(q, 3, replace(SAMPLING, seed=seed), 3, 8, 0, sharpness)
        assert (children.scores <= children.bounds).all()
        assert (children.bounds[0, 1:] <= children.bounds[0, :-1]).all()
        first = np.searchsorted(q.ids, children.ids[0, 0])
        assert np.exp(children.scores[0, 0]) == pytest.approx(1 - sharpness * (1 - q.probs[first]), abs=1e-9)
        assert np.exp(children.scores[0]).sum() <= 1 + 1e-9, "the children exclude one another"


GROWTHS = [
    Growth(2, 2, 2),
    Growth(2, 3, 2),
    Growth(2, 4, 2, sharpness=0.3),
    Growth(2, 3, 2, sharpness=0.6, min_prob=0.1),
    Growth(1, 3, 3, sharpness=0.5, min_prob=0.3),
]
#: Of two tokens, so that three levels can be enumerated.
DEEP_GROWTHS = [Growth(2, nodes, 3, sharpness) for nodes in (3, 4, 5) for sharpness in (1.0, 0.4)]


@pytest.mark.parametrize("growth", GROWTHS, ids=str)
@pytest.mark.parametrize("seed", [1, 2])
def test_what_is_accepted_has_the_target_s_law(growth: Growth, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert error(growth, table(3, seed), table(3, seed + 10), monkeypatch) < EXACT


@pytest.mark.parametrize("growth", DEEP_GROWTHS, ids=str)
@pytest.mark.parametrize("seed", [1, 2])
def test_three_levels_keep_the_law(growth: Growth, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert error(growth, table(2, seed, 3), table(2, seed + 10, 3), monkeypatch) < EXACT


@pytest.mark.parametrize("sharpness", [1.0, 0.4])
def test_a_chain_that_ends_before_an_unlikely_token_keeps_the_law_of_block(
    sharpness: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    growth = Growth(1, 3, 3, sharpness, min_prob=0.4)
    assert error(growth, table(3, 3), table(3, 4), monkeypatch, Rule.BLOCK) < EXACT


@pytest.mark.parametrize(
    "bug",
    [
        {"ranks_by_token": True},
        {"ranks_by_token": True, "min_prob": 0.3},
        {"beam_search": True},
        {"shares_noise": True},
    ],
    ids=str,
)
def test_a_choice_by_what_was_sampled_leaves_the_law(bug: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def q(prefix: Sequence[int]) -> FloatArray:
        share = (25, 14, 28, 0)[len(prefix)]
        return np.array([share, 64 - share]) / 64

    growth, p = Growth(2, 4, 3), table(2, 5, 3)
    assert error(growth, p, q, monkeypatch) < EXACT
    assert error(replace(growth, **bug), p, q, monkeypatch) > 1e-3
