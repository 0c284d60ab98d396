"""The torch twin of `orchestrator/sampling/accept.py`: the drafts of many requests decided at once, on the logits' device.

Under every rule a drafted node has a chance that does not depend on what is decided elsewhere, and each row of p
becomes what is recovered from if the walk ends there. So all chances meet their noise at once, the decisions are copied
out once, the host follows them down the trees, and all next tokens are drawn at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from orchestrator.core.noise import Stream
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Distribution
from orchestrator.sampling.accept import AcceptedPath
from runtime.sampling.noise import draw, seed_words, uniform

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class AcceptInput:
    """What one request asks to have decided.

    q: per node 1…m what it was drawn from, the same for siblings; empty: they were chosen. prefix_len: of the step.
    """

    tree: TokenTree
    q: tuple[Distribution, ...]
    prefix_len: int
    sampling: Sampling


def accepted_paths(asks: Sequence[AcceptInput], log_p: Tensor) -> list[AcceptedPath]:
    """Return the walk of every ask; none may be under the rule `coupled`, which needs picks alone.

    log_p: (rows, V) float64: of every ask its root and its nodes 1…m, ask by ask. A greedy row is 0 at one token.
    Invariant: equals the reference with `KeyedDraws(seed, prefix_len)` ask by ask, whatever the other asks.
    """
    if not asks:
        return []
    nodes, left = _Nodes.of(asks), log_p.exp()
    key = seed_words([ask.sampling.seed for ask in asks], log_p.device)
    prefix_lens = torch.tensor([[ask.prefix_len] for ask in asks], device=log_p.device)
    is_accepted = _trials(nodes, key, prefix_lens) < _chances(asks, nodes, left)
    values = log_p[_on(nodes.parents, left), _on(nodes.tokens, left)].where(is_accepted, -inf).tolist()
    paths, ends = _paths(asks, values)
    positions = prefix_lens + torch.tensor([[len(path)] for path in paths], device=log_p.device)
    next_tokens = draw(left[_on(ends, left)].log(), key, positions, Stream.RECOVER, prefix_lens).tolist()
    return [AcceptedPath(path, token) for path, token in zip(paths, next_tokens, strict=True)]


class _Nodes(NamedTuple):
    """DraftResponse nodes, ask by ask, (n,) int64 each: whose they are, rows of log p, and places in their trees."""

    asks: Ints
    rows: Ints
    parents: Ints  # rows too
    tokens: Ints
    depths: Ints
    indices: Ints  # node − 1
    numbers: Ints  # child numbers

    @classmethod
    def of(cls, asks: Sequence[AcceptInput]) -> _Nodes:
        """Return the nodes 1…m of all asks."""
        sizes = np.array([ask.tree.num_nodes for ask in asks])
        owners = np.repeat(np.arange(len(asks)), sizes)
        starts = np.cumsum(sizes) - sizes
        parents = (starts + np.arange(len(asks)))[owners] + np.concatenate([ask.tree.parents for ask in asks])
        tokens = np.concatenate([ask.tree.tokens for ask in asks]).astype(np.int64)
        depths = np.concatenate([ask.tree.depths[1:] for ask in asks]).astype(np.int64)
        every = np.arange(len(owners))
        return cls(owners, every + owners + 1, parents, tokens, depths, every - starts[owners], _ranks(parents))

    def only(self, index: Ints) -> _Nodes:
        """Return these of the nodes; index: (k,) int64, ascending."""
        return _Nodes(*(column[index] for column in self))

    def families(self) -> tuple[Ints, Ints]:
        """Return the first child of every parent, (f,), and every node's family, (n,)."""
        _, firsts, places = np.unique(self.parents, return_index=True, return_inverse=True)
        return firsts, places


def _trials(nodes: _Nodes, key: tuple[Tensor, Tensor], prefix_lens: Tensor) -> Tensor:
    """Return every node's uniform, (n,) float64, never 0 and never 1; key, prefix_lens: (asks, 1)."""
    asks, depths, numbers = (_on(column, prefix_lens) for column in (nodes.asks, nodes.depths, nodes.numbers))
    low, high, epochs = (column[asks, 0] for column in (*key, prefix_lens))
    return uniform((low, high), epochs + depths - 1, numbers, Stream.ACCEPT, epochs)


# Chances of nodes. `left`: p, (rows, V); its rows become in place what is recovered from if the walk ends there.


def _chances(asks: Sequence[AcceptInput], nodes: _Nodes, left: Tensor) -> Tensor:
    """Return the chance of every node given that its parent was reached, (n,) float64, each by its own rule."""
    chances = left.new_zeros(len(nodes.rows))
    for is_mine, rule in _RULES:
        index = np.flatnonzero(np.array([is_mine(ask) for ask in asks])[nodes.asks])
        if len(index):
            chances[_on(index, left)] = rule(left, nodes.only(index), asks)
    return chances


def _deterministic(left: Tensor, nodes: _Nodes, asks: Sequence[AcceptInput]) -> Tensor:
    """p(y) over what its earlier siblings leave: a sum, not 1 − their sum, so that the last token left is certain."""
    firsts, places = nodes.families()
    parents, tokens = _on(nodes.parents, left), _on(nodes.tokens, left)
    probs = left[parents, tokens]
    left[parents, tokens] = 0.0
    siblings = left.new_zeros(len(firsts), int(nodes.numbers.max()) + 1)
    where = _on(places, left), _on(nodes.numbers, left)
    siblings[where] = probs
    rest = left[_on(nodes.parents[firsts], left)].sum(dim=-1, keepdim=True)
    return probs / (rest + siblings.flip(-1).cumsum(dim=-1).flip(-1))[where]


def _sampled(left: Tensor, nodes: _Nodes, asks: Sequence[AcceptInput]) -> Tensor:
    """p(y) / q(y), then p ← norm(max(p − q, 0)) and q ← norm(q without y): one round per child number."""
    firsts, places = nodes.families()
    ids, probs = _drafted(nodes.only(firsts), asks, left)
    chances = left.new_zeros(len(nodes.rows))
    for number in range(int(nodes.numbers.max()) + 1):
        index = np.flatnonzero(nodes.numbers == number)
        parents, tokens, family = (_on(column[index], left) for column in (nodes.parents, nodes.tokens, places))
        is_tried = ids[family] == tokens[:, None]
        chances[_on(index, left)] = left[parents, tokens] / (probs[family] * is_tried).sum(dim=-1)
        left[parents] = _norm(_residual(left[parents], ids[family], probs[family]))
        probs[family] = _norm(probs[family].masked_fill(is_tried, 0.0))
    return chances


def _block(left: Tensor, nodes: _Nodes, asks: Sequence[AcceptInput]) -> Tensor:
    """The chance that a chain is accepted up to here at least; max(joint · p − q, 0) is what is left short of its end.

    The gain's denominator is written so that a joint of 1 is certain in rounding too.
    """
    ids, probs = _drafted(nodes, asks, left)
    rows, parents, tokens = (_on(column, left) for column in (nodes.rows, nodes.parents, nodes.tokens))
    drafted = (probs * (ids == tokens[:, None])).sum(dim=-1)
    joint = left.new_ones(len(left))
    for depth in range(1, int(nodes.depths.max()) + 1):
        now = _on(np.flatnonzero(nodes.depths == depth), left)
        joint[rows[now]] = (joint[parents[now]] * left[parents[now], tokens[now]] / drafted[now]).clamp(max=1.0)
    left[parents] = _residual(joint[parents, None] * left[parents], ids, probs)
    gains, joints = left[rows].sum(dim=-1), joint[rows]
    inner = gains / (gains + (1.0 - joints))
    return torch.where(_on(np.isin(nodes.rows, nodes.parents), left), inner.nan_to_num(1.0), joints)


def _typical(left: Tensor, nodes: _Nodes, asks: Sequence[AcceptInput]) -> Tensor:
    """1 where p(y) > min(ε, δ·exp(−H(p))), else 0; whatever noise they meet, these are kept."""
    firsts, places = nodes.families()
    entropies = torch.special.entr(left[_on(nodes.parents[firsts], left)]).sum(dim=-1)[_on(places, left)]
    limits = np.array([(asks[ask].sampling.epsilon, asks[ask].sampling.delta) for ask in nodes.asks.tolist()])
    epsilon, delta = _on(limits, left).unbind(dim=-1)
    probs = left[_on(nodes.parents, left), _on(nodes.tokens, left)]
    return (probs > torch.minimum(epsilon, delta * torch.exp(-entropies))).double()


_RULES: tuple[tuple[Callable[[AcceptInput], bool], Callable[[Tensor, _Nodes, Sequence[AcceptInput]], Tensor]], ...] = (
    (lambda ask: ask.sampling.rule is Rule.REJECTION and not ask.q, _deterministic),
    (lambda ask: ask.sampling.rule is Rule.REJECTION and bool(ask.q), _sampled),
    (lambda ask: ask.sampling.rule is Rule.BLOCK, _block),
    (lambda ask: ask.sampling.rule is Rule.TYPICAL, _typical),
)


# Paths. `values`: per node log p(y) where it is accepted, −inf where it is not.


def _paths(asks: Sequence[AcceptInput], values: Sequence[float]) -> tuple[list[tuple[int, ...]], Ints]:
    """Return the path of every ask and the row of log p where it ends, (asks,); values: of all asks' nodes."""
    stops = np.cumsum([ask.tree.num_nodes for ask in asks])
    starts = [0, *stops.tolist()]
    parts = (values[start:stop] for start, stop in itertools.pairwise(starts))
    paths = [accepted_path(ask.sampling.rule, ask.tree, part) for ask, part in zip(asks, parts, strict=True)]
    lasts = np.array([path[-1] if path else 0 for path in paths])
    return paths, np.array(starts[:-1]) + np.arange(len(asks)) + lasts


# Arrays


def _drafted(nodes: _Nodes, asks: Sequence[AcceptInput], like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the q of these nodes as ids (n, k) int64 and probabilities (n, k) float64, padded with 0s of id 0.

    A chosen node's is the point mass on it.
    """
    owners = zip(nodes.asks.tolist(), nodes.indices.tolist(), nodes.tokens.tolist(), strict=True)
    found = [asks[ask].q[index] if asks[ask].q else _point(token) for ask, index, token in owners]
    counts = np.array([len(each.ids) for each in found])
    held = np.arange(counts.max()) < counts[:, None]
    ids, weights = np.zeros(held.shape, np.int64), np.zeros(held.shape)
    ids[held] = np.concatenate([each.ids for each in found])
    weights[held] = np.concatenate([each.weights for each in found])
    return _on(ids, like), _norm(_on(weights, like))


def _point(token: int) -> Distribution:
    return Distribution(np.array([token], np.int32), np.ones(1, np.float32))


def _residual(rows: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    """Return max(p − q, 0) per row; rows: (n, V). ids, probs: (n, k) as in `_drafted`."""
    return rows.scatter_add(-1, ids, -probs).clamp_(min=0.0)


def _norm(weights: Tensor) -> Tensor:
    """Renormalise rows; nothing left stays nothing."""
    total = weights.sum(dim=-1, keepdim=True)
    return weights / total.where(total > 0, 1.0)


def _ranks(parents: Ints) -> Ints:
    """Return how many earlier nodes have the same parent, (n,)."""
    order = parents.argsort(kind="stable")
    ordered = parents[order]
    ranks = np.empty_like(parents)
    ranks[order] = np.arange(len(parents)) - np.searchsorted(ordered, ordered)
    return ranks


def _on(array: npt.NDArray[np.generic], like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device)


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
