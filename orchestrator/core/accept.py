"""What a step accepts of its token tree: the path, and the next token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from orchestrator.core.tree import TokenTree


class AcceptedPath(NamedTuple):
    """path: the accepted nodes below the root, in order. next_token: the bonus or recovered token."""

    path: tuple[int, ...]
    next_token: int


def accept_coupled(tree: TokenTree, target_tokens: Sequence[int]) -> AcceptedPath:
    """Descend while the target's token is a child; the first target token that is not a child is the next token.

    target_tokens: (m + 1,), the target's token at every node, argmax(log p + noise).
    Invariant: for every tree, the emitted tokens are those that the target alone samples with this noise.
    Source: docs/losslessness.md; Daliri et al. 2024, arXiv:2408.07978 (communication-free coupling).
    """
    path: list[int] = []
    node = 0
    while (child := tree.children[node].get(target_tokens[node])) is not None:
        path.append(child)
        node = child
    return AcceptedPath(tuple(path), target_tokens[node])


def longest_path(tree: TokenTree, log_probs: Sequence[float]) -> tuple[int, ...]:
    """Return the longest path of accepted nodes; among equally long paths the most probable, then the first.

    log_probs: (m,), log p of the token at each of the nodes 1…m if the node is accepted, else −inf.
    """
    paths: dict[int, tuple[tuple[int, ...], float]] = {0: ((), 0.0)}
    for node, (parent, log_prob) in enumerate(zip(tree.parents.tolist(), log_probs, strict=True), start=1):
        if parent in paths and log_prob > -math.inf:
            path, log_likelihood = paths[parent]
            paths[node] = (*path, node), log_likelihood + log_prob
    return max(paths.values(), key=lambda found: (len(found[0]), found[1]))[0]
