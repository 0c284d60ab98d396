"""The rules `rejection`, `block` and `typical` on a GPU (torch), for the trees of many requests at once.

Under every rule, a node's acceptance probability does not depend on the decisions at other nodes, and each row of p
can be turned into the residual that the next token is sampled from if the path ends there. So all nodes are decided
together, the decisions are copied to the host once, the host follows them down the trees, and all next tokens are
sampled together.
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

from orchestrator.core.accept import AcceptedPath, longest_path
from orchestrator.core.noise import Stream
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Distribution
from runtime.engine.sampling.noise import draw, seed_words, uniform
from runtime.engine.staging import staged

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class AcceptInput:
    """One request's tree, to be accepted under its rule.

    q: the distribution that each of the nodes 1…m was sampled from, equal for siblings; empty for deterministic drafts.
    prefix_len: number of committed tokens.
    """

    tree: TokenTree
    q: tuple[Distribution, ...]
    prefix_len: int
    sampling: Sampling

    @property
    def positions(self) -> list[int]:
        """The absolute position of the token that each row of logits predicts; rows: the root and the nodes."""
        positions: list[int] = (self.tree.depths + self.prefix_len).tolist()
        return positions

    @property
    def samplings(self) -> list[Sampling]:
        """The request's sampling, once for each row."""
        return [self.sampling] * (self.tree.num_nodes + 1)

    @property
    def is_coupled(self) -> bool:
        """True when the target tokens alone decide; this engine's own rule, `Rule.ENGINE`, is `coupled`."""
        return self.sampling.rule in (Rule.COUPLED, Rule.ENGINE)


def accepted_paths(inputs: Sequence[AcceptInput], log_p: Tensor) -> list[AcceptedPath]:
    """Return the accepted path of every input under its own rule, which is not `coupled`.

    log_p: (rows, V) float64, root and nodes 1…m of each input in turn, not changed; a greedy row is 0 at one token.
    Invariant: each path depends only on its own input, and is that of `native/sampling/rules.cpp` unless rounding below
    1e-12 decides.
    """
    if not inputs:
        return []
    nodes, p = _Nodes.of(inputs), log_p.exp()
    key = seed_words([each.sampling.seed for each in inputs], p.device)
    prefix_lens = staged([[each.prefix_len] for each in inputs], p.device)
    log_probs = p[_tensor(nodes.parents, p), _tensor(nodes.tokens, p)].log()
    is_accepted = _uniforms(nodes, key, prefix_lens) < _probabilities(inputs, nodes, p)
    values = log_probs.where(is_accepted, -inf).tolist()
    paths, ends = _paths(inputs, values)
    positions = prefix_lens + staged([[len(path)] for path in paths], p.device)
    next_tokens = draw(p[_tensor(ends, p)].log(), key, positions, Stream.RECOVER, prefix_lens).tolist()
    return [AcceptedPath(path, token) for path, token in zip(paths, next_tokens, strict=True)]


class _Nodes(NamedTuple):
    """The draft nodes 1…m of every input in turn, as columns of (n,) int64. Siblings form a family."""

    inputs: Ints  # index of the input
    rows: Ints  # row of log p
    parents: Ints  # row of log p
    tokens: Ints
    depths: Ints
    indices: Ints  # number of the node in its tree, minus one
    ranks: Ints  # number of earlier siblings

    @classmethod
    def of(cls, inputs: Sequence[AcceptInput]) -> _Nodes:
        sizes = np.array([each.tree.num_nodes for each in inputs])
        owners = np.repeat(np.arange(len(inputs)), sizes)
        starts = np.cumsum(sizes) - sizes
        parents = (starts + np.arange(len(inputs)))[owners] + np.concatenate([each.tree.parents for each in inputs])
        tokens = np.concatenate([each.tree.tokens for each in inputs]).astype(np.int64)
        depths = np.concatenate([each.tree.depths[1:] for each in inputs]).astype(np.int64)
        numbers = np.arange(len(owners))
        return cls(owners, numbers + owners + 1, parents, tokens, depths, numbers - starts[owners], _ranks(parents))

    def select(self, index: Ints) -> _Nodes:
        """Return the nodes at `index`, (k,) int64, ascending."""
        return _Nodes(*(column[index] for column in self))

    def families(self) -> tuple[Ints, Ints]:
        """Return the first node of every family, (f,), and the family of every node, (n,)."""
        _, firsts, families = np.unique(self.parents, return_index=True, return_inverse=True)
        return firsts, families


def _ranks(parents: Ints) -> Ints:
    """Return how many earlier nodes have the same parent, (n,)."""
    order = parents.argsort(kind="stable")
    ordered = parents[order]
    ranks = np.empty_like(parents)
    ranks[order] = np.arange(len(parents)) - np.searchsorted(ordered, ordered)
    return ranks


def _uniforms(nodes: _Nodes, key: tuple[Tensor, Tensor], prefix_lens: Tensor) -> Tensor:
    """Return every node's uniform noise, (n,) float64, never 0 and never 1; key, prefix_lens: (inputs, 1)."""
    owners, depths, ranks = (_tensor(column, prefix_lens) for column in (nodes.inputs, nodes.depths, nodes.ranks))
    low, high, epochs = (column[owners, 0] for column in (*key, prefix_lens))
    return uniform((low, high), epochs + depths - 1, ranks, Stream.ACCEPT, epochs)


# Each rule changes p, (rows, V), in place: a row becomes the residual to sample from if the path ends at its node.


def _probabilities(inputs: Sequence[AcceptInput], nodes: _Nodes, p: Tensor) -> Tensor:
    """Return the probability of accepting each node given that its parent is accepted, (n,) float64."""
    probabilities = p.new_zeros(len(nodes.rows))
    for applies, rule in _RULES:
        index = np.flatnonzero(np.array([applies(each) for each in inputs])[nodes.inputs])
        if len(index):
            probabilities[_tensor(index, p)] = rule(p, nodes.select(index), inputs)
    return probabilities


def _deterministic(p: Tensor, nodes: _Nodes, inputs: Sequence[AcceptInput]) -> Tensor:
    """Return p(y) divided by the mass that the earlier siblings leave.

    That mass is added up, not computed as 1 − their mass, so that the only token left is accepted with probability 1.
    """
    firsts, families = nodes.families()
    parents, tokens = _tensor(nodes.parents, p), _tensor(nodes.tokens, p)
    probs = p[parents, tokens]
    p[parents, tokens] = 0.0
    siblings = p.new_zeros(len(firsts), int(nodes.ranks.max()) + 1)
    places = _tensor(families, p), _tensor(nodes.ranks, p)
    siblings[places] = probs
    masses = [p[_tensor(nodes.parents[firsts], p)].sum(dim=-1)]
    for column in siblings.unbind(-1)[::-1]:
        masses.append(masses[-1] + column)
    left = torch.stack(masses[:0:-1], dim=-1)[places]
    return torch.where(left > 0.0, probs / left, 0.0)


def _sampled(p: Tensor, nodes: _Nodes, inputs: Sequence[AcceptInput]) -> Tensor:
    """Return p(y) / q(y); then p ← norm(max(p − q, 0)) and q ← norm(q without y): one round per rank among siblings."""
    firsts, families = nodes.families()
    q = _dense_q(nodes.select(firsts), inputs, p)
    probabilities = p.new_zeros(len(nodes.rows))
    for rank in range(int(nodes.ranks.max()) + 1):
        index = np.flatnonzero(nodes.ranks == rank)
        parents, tokens, family = (_tensor(column[index], p) for column in (nodes.parents, nodes.tokens, families))
        probabilities[_tensor(index, p)] = p[parents, tokens] / q[family, tokens]
        p[parents] = _norm(_residual(p[parents], q[family]))
        q[family, tokens] = 0.0
        q[family] = _norm(q[family])
    return probabilities


def _block(p: Tensor, nodes: _Nodes, inputs: Sequence[AcceptInput]) -> Tensor:
    """Return the probability of accepting a chain at least up to this node; the residual is max(joint · p − q, 0).

    The order of the sum in the denominator keeps a joint probability of 1 exactly 1 after rounding.
    """
    q = _dense_q(nodes, inputs, p)
    rows, parents, tokens = (_tensor(column, p) for column in (nodes.rows, nodes.parents, nodes.tokens))
    q_of_token = q[torch.arange(len(q), device=q.device), tokens]
    joint = p.new_ones(len(p))
    for depth in range(1, int(nodes.depths.max()) + 1):
        now = _tensor(np.flatnonzero(nodes.depths == depth), p)
        joint[rows[now]] = (joint[parents[now]] * p[parents[now], tokens[now]] / q_of_token[now]).clamp(max=1.0)
    p[parents] = _residual(joint[parents, None] * p[parents], q)
    gains, joints = p[rows].sum(dim=-1), joint[rows]
    masses = gains + (1.0 - joints)
    inner = torch.where(masses > 0.0, gains / masses, 1.0)
    return torch.where(_tensor(np.isin(nodes.rows, nodes.parents), p), inner, joints)


def _typical(p: Tensor, nodes: _Nodes, inputs: Sequence[AcceptInput]) -> Tensor:
    """Return 1 where p(y) > min(ε, δ·exp(−H(p))), else 0, so that the noise decides nothing."""
    firsts, families = nodes.families()
    rows = p[_tensor(nodes.parents[firsts], p)]
    entropies = -(rows * torch.where(rows > 0.0, rows.log(), 0.0)).sum(dim=-1)[_tensor(families, p)]
    limits = np.array([(each.sampling.epsilon, each.sampling.delta) for each in inputs])[nodes.inputs]
    epsilon, delta = _tensor(limits, p).unbind(dim=-1)
    probs = p[_tensor(nodes.parents, p), _tensor(nodes.tokens, p)]
    return (probs > torch.minimum(epsilon, delta * (-entropies).exp())).double()


_RULES: tuple[tuple[Callable[[AcceptInput], bool], Callable[[Tensor, _Nodes, Sequence[AcceptInput]], Tensor]], ...] = (
    (lambda each: each.sampling.rule is Rule.REJECTION and not each.q, _deterministic),
    (lambda each: each.sampling.rule is Rule.REJECTION and bool(each.q), _sampled),
    (lambda each: each.sampling.rule is Rule.BLOCK, _block),
    (lambda each: each.sampling.rule is Rule.TYPICAL, _typical),
)


def _dense_q(nodes: _Nodes, inputs: Sequence[AcceptInput], p: Tensor) -> Tensor:
    """Return the q of these nodes, (n, V) float64; that of a deterministic draft is the point mass on its token."""
    found = [
        inputs[i].q[index] if inputs[i].q else Distribution(np.array([token], np.int32), np.ones(1, np.float32))
        for i, index, token in zip(nodes.inputs, nodes.indices, nodes.tokens, strict=True)
    ]
    q = p.new_zeros(len(found), p.shape[-1])
    rows = np.repeat(np.arange(len(found)), [len(each.ids) for each in found])
    ids = np.concatenate([each.ids for each in found]).astype(np.int64)
    q[_tensor(rows, p), _tensor(ids, p)] = _tensor(np.concatenate([each.probs for each in found]), p)
    return q


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """Return max(p − q, 0); p, q: (n, V)."""
    return (p - q).clamp_(min=0.0)


def _norm(weights: Tensor) -> Tensor:
    """Return the rows scaled to sum 1; rows of zeros stay zero."""
    mass = weights.sum(dim=-1, keepdim=True)
    return weights / mass.where(mass > 0, 1.0)


def _tensor(array: npt.NDArray[np.generic], like: Tensor) -> Tensor:
    return staged(array, like.device)


def _paths(inputs: Sequence[AcceptInput], values: Sequence[float]) -> tuple[list[tuple[int, ...]], Ints]:
    """Return the accepted path of every input, and the row of log p of its last node, (inputs,).

    values: (n,), log p(y) of every node that is accepted, −inf of the others.
    """
    stops = np.cumsum([each.tree.num_nodes for each in inputs])
    starts = [0, *stops.tolist()]
    parts = (values[start:stop] for start, stop in itertools.pairwise(starts))
    paths = [_PATHS[each.sampling.rule](each.tree, part) for each, part in zip(inputs, parts, strict=True)]
    lasts = np.array([path[-1] if path else 0 for path in paths])
    return paths, np.array(starts[:-1]) + np.arange(len(inputs)) + lasts


def _first_accepted(tree: TokenTree, values: Sequence[float]) -> tuple[int, ...]:
    """Return the path that descends to the first accepted child of each node."""
    path: list[int] = []
    siblings = tree.children[0]
    while (node := next((child for child in siblings.values() if values[child - 1] > -inf), None)) is not None:
        path.append(node)
        siblings = tree.children[node]
    return tuple(path)


def _last_accepted(tree: TokenTree, values: Sequence[float]) -> tuple[int, ...]:
    """Return the path to the last accepted node of a chain."""
    return tuple(range(1, max((node for node, value in enumerate(values, 1) if value > -inf), default=0) + 1))


_PATHS = {Rule.REJECTION: _first_accepted, Rule.BLOCK: _last_accepted, Rule.TYPICAL: longest_path}
