"""Static draft trees by measured accuracy; a tree is its nodes, each the ranks on the path to it."""

from __future__ import annotations

from collections.abc import Set
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

Path = tuple[int, ...]
Tree = Set[Path]


def chain(depth: int) -> Tree:
    """The best guess at each depth."""
    return {(0,) * length for length in range(1, depth + 1)}


def best_tree(hits: npt.NDArray[np.float64], num_nodes: int) -> Tree:
    """The tree of `num_nodes` nodes with the most accepted tokens, were depths independent (arXiv:2401.10774, 2.3.3).

    hits: (D, R), the share of places where the token of rank r at depth j is right. A node counts the product of the
    hits on its path, so the best ones always have their parents among them.
    """
    tree: set[Path] = set()
    open_nodes: list[tuple[float, Path]] = [(-float(hits[0, 0]), (0,))]
    while open_nodes and len(tree) < num_nodes:
        value, path = heappop(open_nodes)
        tree.add(path)
        depth, rank = len(path), path[-1]
        if rank + 1 < hits.shape[1] and hits[depth - 1, rank] > 0:
            sibling = value / float(hits[depth - 1, rank]) * float(hits[depth - 1, rank + 1])
            heappush(open_nodes, (sibling, (*path[:-1], rank + 1)))
        if depth < hits.shape[0]:
            heappush(open_nodes, (value * float(hits[depth, 0]), (*path, 0)))
    return tree
