"""The dynamic draft tree of EAGLE-2 and EAGLE-3 by definition: a node's score is the log-probability of its path."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Path = tuple[int, ...]


def dynamic_tree(
    log_probs: Callable[[Path], np.ndarray], top_k: int, levels: int, max_nodes: int
) -> list[tuple[Path, float]]:
    """Return the paths of the tree's nodes with their scores, best first; `log_probs(path)` is (V,), −inf = never.

    Each level gives every open node its `top_k` best children, of which the `top_k` best overall are open in the next
    level. At the end the `max_nodes` best of all children are kept; ties go to the smaller depth, then to the child
    that was made first. The reference's `depth` is levels − 1, its `total_token` is max_nodes + 1.
    """
    made: dict[Path, float] = {}
    open_nodes: list[tuple[Path, float]] = [((), 0.0)]
    for _ in range(levels):
        children = [child for path, score in open_nodes for child in best_children(log_probs(path), path, score, top_k)]
        made.update(children)
        open_nodes = sorted(children, key=lambda child: -child[1])[:top_k]
    return sorted(made.items(), key=lambda node: (-node[1], len(node[0])))[:max_nodes]


def best_children(log_probs: np.ndarray, path: Path, score: float, top_k: int) -> list[tuple[Path, float]]:
    """Return the `top_k` most likely children of a node, ties to the lower id, with their scores."""
    ids = [int(token) for token in np.argsort(-log_probs, kind="stable")[:top_k] if np.isfinite(log_probs[token])]
    return [((*path, token), score + float(log_probs[token])) for token in ids]
