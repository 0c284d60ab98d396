"""Sampled drafts: the distribution q that each draft token was sampled from, and what must hold for it.

docs/wire.md, Siblings: the children of one node are sampled without replacement from one q.
"""

from __future__ import annotations

import numpy as np

from orchestrator.core.arrays import FloatArray, IdArray
from orchestrator.core.errors import EngineError
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Distribution

#: A drafter samples only from this many of its most probable tokens; q is their distribution.
MAX_CANDIDATES = 64


def draft_distribution(ids: IdArray, probs: FloatArray) -> Distribution:
    """Return q: the MAX_CANDIDATES most probable ids, the lowest ids first among equals.

    ids: (k,) int32, ascending. probs: (k,) float64; they need not sum to 1.
    """
    weights = probs.astype(np.float32)
    if len(ids) > MAX_CANDIDATES:
        best = np.sort(np.argsort(-weights, kind="stable")[:MAX_CANDIDATES])
        ids, weights = ids[best], weights[best]
    return Distribution(ids[weights > 0].astype(np.int32), weights[weights > 0])


def check_q(tree: TokenTree, q: tuple[Distribution, ...], vocab_size: int) -> None:
    """Raise EngineError if the nodes of a tree cannot have been sampled from q. An empty q is valid.

    A q with wrong numbers would silently change the distribution of the text.
    """
    if errors := _errors_by_node(tree, q, vocab_size):
        raise errors[min(errors)]


def nodes_with_valid_q(tree: TokenTree, q: tuple[Distribution, ...], vocab_size: int) -> IdArray:
    """Return the nodes whose own q is valid, and that of their siblings and of all their ancestors.

    Returns (k,) int32, nodes of 1…m, ascending.
    Invariant: whether a node is kept depends only on the q of its own level and of the levels above, which existed
    before the node was sampled. If what follows a node could drop it, a token after which the drafter fails would never
    be drafted although q gives it a probability, and the text would no longer have the target's distribution.
    Raises: EngineError if q does not have one distribution per node.
    """
    if not q:
        return np.arange(1, tree.num_nodes + 1, dtype=np.int32)
    invalid_parents = {int(tree.parents[node - 1]) for node in _errors_by_node(tree, q, vocab_size)}
    kept = {0}
    for node, parent in enumerate(tree.parents.tolist(), start=1):
        if parent in kept and parent not in invalid_parents:
            kept.add(node)
    return np.array(sorted(kept)[1:], np.int32)


def _errors_by_node(tree: TokenTree, q: tuple[Distribution, ...], vocab_size: int) -> dict[int, EngineError]:
    """Return the error of every node whose q is invalid."""
    if q and len(q) != tree.num_nodes:
        raise EngineError(f"there are {len(q)} distributions q for {tree.num_nodes} nodes")
    errors: dict[int, EngineError] = {}
    first_sibling_q: dict[int, Distribution] = {}
    for node, (node_q, parent) in enumerate(zip(q, tree.parents.tolist(), strict=False), start=1):
        sibling_q = first_sibling_q.setdefault(parent, node_q)
        try:
            _check(node_q, int(tree.tokens[node - 1]), vocab_size, node)
            if sibling_q is not node_q and not all(map(np.array_equal, sibling_q, node_q)):
                raise EngineError(f"the q of node {node} differs from that of its siblings")
        except EngineError as error:
            errors[node] = error
    return errors


def _check(q: Distribution, token: int, vocab_size: int, node: int) -> None:
    ids, weights = q
    if len(ids) != len(weights) or not len(ids) or (np.diff(ids) <= 0).any() or ids[0] < 0 or ids[-1] >= vocab_size:
        raise EngineError(f"q of node {node} must have ascending ids in 0..{vocab_size - 1}, one weight each")
    if not (np.isfinite(weights) & (weights > 0)).all():
        raise EngineError(f"q of node {node} has a weight that is not a positive number")
    if token not in ids:
        raise EngineError(f"q of node {node} does not contain the node's token")
