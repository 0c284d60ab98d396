"""How trees grow and candidates are ranked, against trees made by hand."""

from __future__ import annotations

import numpy as np
import pytest

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
