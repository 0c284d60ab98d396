"""Measured acceptance: ranks, trees, sharpness."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from build.heads.make import make_heads
from build.heads.measure import Recorded, acceptance_length, accuracies, best_tree, chain, measure
from build.heads.sharpness import TRIED, argmax_sharpness, sampled_sharpness
from build.heads.target import FrozenTarget
from runtime.models.heads.sharpness import LEAST
from tests.support.heads_training import SIZES, STREAM, TINY

RANKS = np.array([[[0, 0, 1], [0, 3, 0], [2, 0, 0], [0, 0, 0], [1, 1, 9], [0, 9, 9]]])


def test_acceptance_length_walks_from_step_to_step():
    # Lengths along the rows: 2, 1, 0, 3, 0, 1; the walk meets row 0 (3 tokens) and row 3 (4 tokens), and is at the end.
    assert acceptance_length(RANKS, chain(3)) == 3.0
    assert acceptance_length(RANKS, {(1,), (1, 1)}) == 6 / 5


def test_accuracies_count_the_right_token_among_the_best():
    found = accuracies(RANKS)
    assert [row["top1"] for row in found] == [0.6667, 0.5, 0.5]
    assert [row["top2"] for row in found] == [0.8333, 0.6667, 0.6667]


def test_best_tree_is_the_best_of_all_trees():
    hits = np.array([[0.5, 0.2, 0.1], [0.4, 0.3, 0.05]])
    nodes = [path for depth in (1, 2) for path in product(range(3), repeat=depth)]
    worth = {path: float(np.prod([hits[j, r] for j, r in enumerate(path)])) for path in nodes}
    for size in range(1, 9):
        tree = best_tree(hits, size)
        assert all(path[:-1] in tree for path in tree if len(path) > 1)
        best = sorted(worth.values(), reverse=True)[:size]
        assert sum(worth[path] for path in tree) == pytest.approx(sum(best))


def test_perfect_head_accepts_its_whole_chain(target: FrozenTarget):
    """Medusa's new heads say what the LM head says of row i: on a constant text that is always right or always wrong."""
    heads = make_heads(target, TINY, STREAM)
    batch = target.read(torch.full((2, 65), 5))
    heads["medusa"][0][-1].weight.data.zero_()
    heads["medusa"][0][-1].weight.data[5] = batch.last.mean((0, 1))
    found = measure(heads["medusa"], Recorded([batch]))
    assert found["accuracy"][0]["top1"] == 1.0
    assert found["places"] == 2 * (64 - 6)


def test_a_head_is_as_sure_of_its_guesses_as_it_is_right(target: FrozenTarget):
    """Of a flat head, whose best guess is always right, and of one that is always wrong and should be less sure."""
    head = make_heads(target, replace(TINY, sizes=replace(SIZES, medusa_heads=1)), STREAM)["medusa"]
    batch = target.read(torch.full((2, 65), 5))
    head[0][0].linear.bias.data.fill_(100.0)  # which drowns the state, so that token 5 has about the logit 1
    head[0][-1].weight.data.zero_()
    head[0][-1].weight.data[5] = 0.01 / batch.last.shape[-1]
    assert argmax_sharpness(head, Recorded([batch])) == min(TRIED)
    wrong = batch._replace(tokens=torch.full_like(batch.tokens, 9))
    assert argmax_sharpness(head, Recorded([wrong])) == 1.0


def test_a_sampled_token_is_as_surely_accepted_as_q_resembles_p(target: FrozenTarget):
    head = make_heads(target, replace(TINY, sizes=replace(SIZES, medusa_heads=1)), STREAM)["medusa"]
    batch = target.read(torch.from_numpy(STREAM[:660].astype(np.int64)).view(10, 66))
    with torch.no_grad():
        q = (0.3 * head[0](batch.last)).softmax(-1)
    head[0][-1].weight.data.mul_(0.3)
    same, other = (batch.p.clone() for _ in range(2))
    same[:, 1:] = q[:, :-1]
    # A p that is a token drawn from q: a second one drawn from q is accepted if it is the same.
    drawn = torch.multinomial(q.flatten(0, 1), 1, generator=torch.Generator().manual_seed(0)).view(*q.shape[:2], 1)
    other[:, 1:] = torch.zeros_like(q).scatter_(-1, drawn, 1.0)[:, :-1]
    assert sampled_sharpness(head, [batch._replace(p=same)]) == LEAST
    assert sampled_sharpness(head, [batch._replace(p=other)]) == pytest.approx(1.0, abs=0.02)
    assert sampled_sharpness(head, [batch._replace(p=0.5 * (same + other))]) == pytest.approx(0.5, abs=0.02)
