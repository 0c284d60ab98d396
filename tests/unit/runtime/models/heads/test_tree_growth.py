"""How trees grow and candidates are ranked, against trees made by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from orchestrator.core.sampling_params import Rule, Sampling
from runtime.models.heads.engines import ranking
from runtime.models.heads.engines.trees import DynamicTree
from tests.support import heads_oracle as oracle
from tests.support.dynamic_tree import dynamic_tree
from tests.support.eagle_heads import Path_

#: Halvings of probability from a path to each of its tokens; what is not named cannot follow.
HALVINGS: dict[Path_, dict[int, int]] = {
    (): {5: 1, 6: 2, 8: 6},
    (5,): {7: 1, 3: 3},
    (6,): {4: 5},
    (8,): {1: 1},
    (5, 7): {2: 1, 9: 2},
    (5, 3): {2: 1},
    (6, 4): {0: 1},
}


def grown_by_hand(max_nodes: int, beam_search: bool) -> tuple[list[int], list[int]]:
    """Return tokens and parents of a tree of three levels, three candidates wide, under `HALVINGS`."""
    growing = DynamicTree(3, max_nodes, 3, beam_search)
    while growing.frontier:
        children = [HALVINGS[tuple(growing.tokens[node] for node in growing.path(n))] for n in growing.frontier]
        ids = [[*row, -1, -1, -1][:3] for row in children]
        scores = [[*(-float(cost) for cost in row.values()), *[-np.inf] * 3][:3] for row in children]
        growing.add_children(np.array(ids, np.int32), np.array(scores))
    tree = growing.token_tree()
    return tree.tokens.tolist(), tree.parents.tolist()


@pytest.mark.parametrize("max_nodes", [60, 6, 5, 4, 3, 2, 1])
def test_beams_packed_by_hand(max_nodes: int) -> None:
    # Level 1 holds 5 (1), 6 (2), 8 (6); level 2 holds 57 (2), 53 (4), 64 (7; 81 ties and came later); the last beams
    # are 572 (3), 579 (4), 532 (5), and not 640 (8). 6, the second likeliest of all, is on none of them. In order, the
    # tie of 53 and 579 going to the smaller depth: 5, 57, 572, 53, 579, 532.
    tokens, parents = [5, 7, 2, 3, 9, 2], [0, 1, 2, 1, 2, 4]
    assert grown_by_hand(max_nodes, beam_search=True) == (tokens[:max_nodes], parents[:max_nodes])


@pytest.mark.parametrize("max_nodes", [60, 11, 10, 9, 7, 4, 3, 2, 1])
def test_a_dynamic_tree_ranked_by_hand(max_nodes: int) -> None:
    # The same levels; all eleven candidates are ranked anew: 5 (1), 6 and 57 (2), 572 (3), 53 and 579 (4), 532 (5),
    # 8 (6), 64 and 81 (7, in this order), 640 (8). Ties go to the smaller depth, then to the one that came first.
    tokens, parents = [5, 6, 7, 2, 3, 9, 2, 8, 4, 1, 0], [0, 0, 1, 3, 1, 3, 5, 0, 2, 8, 9]
    assert grown_by_hand(max_nodes, beam_search=False) == (tokens[:max_nodes], parents[:max_nodes])


def test_beams_share_prefixes_not_tokens() -> None:
    # Beams 5-7-2 and 8-7-2 agree from their second token on, which is no prefix; 5-7-9 shares two tokens with the
    # first. Halvings: 5 (1), 8 (1.5), 57 (2), 87 (2.5), 572 (3), 872 (3.5), 579 (4).
    growing = DynamicTree(3, 60, 3, beam_search=True)
    growing.add_children(np.array([[5, 8, 6]], np.int32), np.array([[-1.0, -1.5, -50.0]]))
    growing.add_children(np.array([[7, 0, 1]] * 3, np.int32), np.array([[-1.0, -70.0, -71.0]] * 3))
    growing.add_children(
        np.array([[2, 9, 1]] * 3, np.int32), np.array([[-1.0, -2.0, -9.0], [-1.0, -8.0, -9.0], [-1.0] * 3])
    )
    tree = growing.token_tree()
    assert not growing.frontier
    assert tree.tokens.tolist() == [5, 8, 7, 7, 2, 2, 9]
    assert tree.parents.tolist() == [0, 0, 1, 2, 3, 4, 3]
    assert tree.mask.tolist() == [[own[: len(other)] == other for other in tree.paths] for own in tree.paths]


@pytest.mark.parametrize(("width", "max_nodes"), [(3, 5), (8, 24), (2, 60)])
def test_what_can_never_be_kept_is_not_expanded(width: int, max_nodes: int) -> None:
    """The tree is the same; the work is bounded by max_nodes."""
    rng = np.random.default_rng(width)
    log_q: dict[Path_, np.ndarray] = {}

    def scores(path: Path_) -> np.ndarray:
        if path not in log_q:
            log_q[path] = oracle.log_softmax(rng.normal(0, 2, 32))
        return log_q[path]

    tree, num_expanded = DynamicTree(width, max_nodes, 6), 0
    while tree.frontier:
        num_expanded += len(tree.frontier)
        paths = [tuple(tree.tokens[node] for node in tree.path(n)) for n in tree.frontier]
        best = [np.argsort(-scores(path), kind="stable")[:width] for path in paths]
        ranked = np.array([scores(path)[row] for path, row in zip(paths, best, strict=True)])
        tree.add_children(np.array(best, np.int32), ranked)
    assert tree.token_tree().paths[1:] == [path for path, _ in dynamic_tree(scores, width, 6, max_nodes)]
    assert num_expanded <= 1 + max_nodes * 2


def test_ranks_are_those_of_the_whole_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few candidates a row has, as long as they are among them."""
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1)) * 4
    ids = torch.arange(5000) * 2
    samplings = [Sampling(), Sampling(0.3, seed=3), Sampling(0.7, seed=4, rule=Rule.REJECTION)]
    few = ranking.rank(logits, [5, 6, 7], samplings, 4, ids)
    monkeypatch.setattr(ranking, "CANDIDATES", 5000)
    every = ranking.rank(logits, [5, 6, 7], samplings, 4, ids)
    assert few.ids.tolist() == every.ids.tolist()
    assert torch.allclose(few.scores, every.scores, atol=0.04)
