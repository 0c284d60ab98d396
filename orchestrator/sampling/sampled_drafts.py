"""Drawn drafts: the distribution q that each draft token was drawn from, and the noise that drew it.

docs/protocol.md, Siblings: children of one node are drawn without replacement from one q.
"""

from __future__ import annotations

import numpy as np

from orchestrator.core.errors import EngineError
from orchestrator.core.noise import Stream, gumbel
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Distribution, FloatArray, IdArray

#: A drafter draws from its best tokens only: their distribution is q.
MAX_CANDIDATES = 64


def noise_key(sampling: Sampling, prefix_len: int) -> tuple[Stream, int]:
    """Return stream and epoch of a drafter's noise in the step at `prefix_len`.

    Under `coupled` it is the target's own; under the other rules acceptance must not depend on it.
    """
    return (Stream.PICK, 0) if sampling.rule is Rule.COUPLED else (Stream.DRAFT, prefix_len)


def cut(ids: IdArray, probs: FloatArray) -> Distribution:
    """Return q: the MAX_CANDIDATES most probable ids, of equals the lowest.

    ids: (k,) ascending. probs: (k,) float64, which need not sum to 1.
    """
    weights = probs.astype(np.float32)
    if len(ids) > MAX_CANDIDATES:
        best = np.sort(np.argsort(-weights, kind="stable")[:MAX_CANDIDATES])
        ids, weights = ids[best], weights[best]
    return Distribution(ids[weights > 0].astype(np.int32), weights[weights > 0])


def draw(q: Distribution, position: int, sampling: Sampling, prefix_len: int) -> int:
    """Return a token of q for `position`, in the step at `prefix_len`; ties go to the lowest id."""
    if len(q.ids) == 1:
        return int(q.ids[0])
    noise = gumbel(sampling.seed, position, q.ids, *noise_key(sampling, prefix_len))
    return int(q.ids[(np.log(q.probs) + noise).argmax()])


def check_drawn(tree: TokenTree, q: tuple[Distribution, ...], vocab_size: int) -> None:
    """Raise EngineError when q cannot be what the nodes of a tree were drawn from; empty means chosen.

    A q that is wrong in its numbers would bend the law of the text, and nobody could tell.
    """
    if wrong := _wrong(tree, q, vocab_size):
        raise wrong[min(wrong)]


def well_drawn(tree: TokenTree, q: tuple[Distribution, ...], vocab_size: int) -> IdArray:
    """Return the nodes (1…m, ascending) that q can be right for: they, their siblings and all above them; (k,) int32.

    Invariant: whether a node is kept depends on the q of its level and those above, which were there before it was drawn, and
    not on what follows. Leaving out a node for what follows would bend the law of the text: a token behind which the
    drafter fails would then never be drafted, though it has its share in q.
    Raises EngineError when there is not one q for each node.
    """
    bad = {int(tree.parents[node - 1]) for node in _wrong(tree, q, vocab_size)}
    kept = {0}
    for node, parent in enumerate(tree.parents.tolist(), start=1):
        if parent in kept and parent not in bad:
            kept.add(node)
    return np.array(sorted(kept)[1:], np.int32)


def _wrong(tree: TokenTree, q: tuple[Distribution, ...], vocab_size: int) -> dict[int, EngineError]:
    """Return what is wrong with q by node; nothing when the drafts were chosen."""
    if q and len(q) != tree.num_nodes:
        raise EngineError(f"there are {len(q)} distributions q for {tree.num_nodes} nodes")
    wrong: dict[int, EngineError] = {}
    first: dict[int, Distribution] = {}
    for node, (drawn_from, parent) in enumerate(zip(q, tree.parents.tolist(), strict=False), start=1):
        sibling = first.setdefault(parent, drawn_from)
        try:
            _check(drawn_from, int(tree.tokens[node - 1]), vocab_size, node)
            if sibling is not drawn_from and not _same(sibling, drawn_from):
                raise EngineError(f"node {node} was drawn from another q than its siblings")
        except EngineError as error:
            wrong[node] = error
    return wrong


def _check(q: Distribution, token: int, vocab_size: int, node: int) -> None:
    ids, weights = q
    if len(ids) != len(weights) or not len(ids) or (np.diff(ids) <= 0).any() or ids[0] < 0 or ids[-1] >= vocab_size:
        raise EngineError(f"q of node {node} must have ascending ids in 0..{vocab_size - 1}, one weight each")
    if not (np.isfinite(weights) & (weights > 0)).all():
        raise EngineError(f"q of node {node} has a weight that is not positive")
    if token not in ids:
        raise EngineError(f"node {node} has a token that its q does not hold")


def _same(left: Distribution, right: Distribution) -> bool:
    return np.array_equal(left.ids, right.ids) and np.array_equal(left.weights, right.weights)
