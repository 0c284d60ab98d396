"""Down a tree whose nodes are accepted or not, by each rule; plain Python, on the host.

values: per node 1…m log p of its token where it is accepted, −inf where it is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from orchestrator.sampling_params import Rule
from orchestrator.tree import TokenTree


def accepted_path(rule: Rule, tree: TokenTree, values: Sequence[float]) -> tuple[int, ...]:
    """Return the nodes of the path that the rule takes, root not included."""
    return _PATHS[rule](tree, values)


def _first(tree: TokenTree, values: Sequence[float]) -> tuple[int, ...]:
    """Return the path to the first accepted child, again and again."""
    path: list[int] = []
    siblings = tree.children[0]
    while (node := next((child for child in siblings.values() if values[child - 1] > -inf), None)) is not None:
        path.append(node)
        siblings = tree.children[node]
    return tuple(path)


def _furthest(tree: TokenTree, values: Sequence[float]) -> tuple[int, ...]:
    """Return the path to the last accepted node of a chain."""
    return tuple(range(1, max((node for node, value in enumerate(values, 1) if value > -inf), default=0) + 1))


def _longest(tree: TokenTree, values: Sequence[float]) -> tuple[int, ...]:
    """Return the longest path of accepted nodes, of equals the likeliest, then the one to the lowest node."""
    paths: dict[int, tuple[tuple[int, ...], float]] = {0: ((), 0.0)}
    for node, (parent, value) in enumerate(zip(tree.parents.tolist(), values, strict=True), start=1):
        if parent in paths and value > -inf:
            path, log_likelihood = paths[parent]
            paths[node] = (*path, node), log_likelihood + value
    return max(paths.values(), key=lambda found: (len(found[0]), found[1]))[0]


_PATHS = {Rule.REJECTION: _first, Rule.BLOCK: _furthest, Rule.TYPICAL: _longest}
