"""A token tree and the distributions q of its nodes as flat tensors, which both calls and answers carry."""

from __future__ import annotations

import numpy as np

from orchestrator.core.messages.tensors import Incoming, Tensors, ids, numbers, pack_ids, split
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Distribution


def pack_tree(tree: TokenTree, q: tuple[Distribution, ...] = ()) -> Tensors:
    """Pack a tree with the q of each of its nodes; a bare root and an empty q are omitted.

    q: one distribution per node 1…m, or empty for deterministic drafts.
    """
    tensors = pack_ids("node_ids", tree.tokens) | pack_ids("node_parents", tree.parents)
    if not q:
        return tensors
    return tensors | {
        "q_counts": np.array([len(each.ids) for each in q], np.int32),
        "q_ids": np.concatenate([each.ids for each in q]),
        "q_weights": np.concatenate([each.weights for each in q]),
    }


def unpack_tree(tensors: Incoming, vocab_size: int, max_nodes: int) -> TokenTree:
    """Unpack a tree; raise EngineError if it breaks an invariant of TokenTree."""
    return TokenTree.checked(ids(tensors, "node_ids"), ids(tensors, "node_parents"), vocab_size, max_nodes)


def unpack_q(tensors: Incoming) -> tuple[Distribution, ...]:
    """Unpack the distributions q; raise EngineError if their sizes do not add up. Their numbers are not checked."""
    counts = ids(tensors, "q_counts").tolist()
    q_ids = split(ids(tensors, "q_ids"), counts, "q_ids")
    weights = split(numbers(tensors, "q_weights"), counts, "q_weights")
    return tuple(map(Distribution, q_ids, weights))
