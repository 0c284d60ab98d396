"""Static draft trees by measured accuracy; a tree is its nodes, each the ranks on the path to it."""

from __future__ import annotations

from collections.abc import Set

import numpy as np
import numpy.typing as npt

from orchestrator.core.static_trees import best_choices

Path = tuple[int, ...]
Tree = Set[Path]


def chain(depth: int) -> Tree:
    """The best guess at each depth."""
    return {(0,) * length for length in range(1, depth + 1)}


def best_tree(hits: npt.NDArray[np.float64], num_nodes: int) -> Tree:
    """The tree of `num_nodes` nodes with the most accepted tokens, were depths independent (arXiv:2401.10774, 2.3.3).

    hits: (D, R), the share of places where the token of rank r at depth j is right.
    """
    return set(best_choices(hits, num_nodes).paths[1:])
