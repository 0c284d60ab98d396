"""Acceptance rules over a token tree, as pure functions; each returns the accepted path and the next token.

`coupled` needs the target's picks alone. The others need p at every node, as it is sampled from, and draws of their
own: `Draws` says what they ask of chance, so that the same code is served with keyed noise and enumerated exactly.
numpy, float64, one request at a time: the reference for the batched twin on the engine's device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from orchestrator.core.noise import Stream, gumbel, uniform
from orchestrator.core.sampling_params import DELTA, EPSILON
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import FloatArray


class AcceptedPath(NamedTuple):
    """path: accepted nodes below the root, in order. next_token: the bonus or recovered token."""

    path: tuple[int, ...]
    next_token: int


class Draws(Protocol):
    """What a rule asks of chance; position: index in the whole sequence of the token that is decided on."""

    def accept(self, probability: float, position: int, child: int) -> bool:
        """Return True with this probability; always at 1, never at 0. child: number of the trial at this position."""

    def recover(self, probs: FloatArray, position: int) -> int:
        """Return a token drawn from probs, (V,) float64, which need not sum to 1."""


@dataclass(frozen=True)
class KeyedDraws:
    """Draws keyed by (seed, position, token) and the step; docs/protocol.md, Noise.

    prefix_len: of the step. Without it, noise that a rejected position used would come back when it is decided anew.
    """

    seed: int
    prefix_len: int

    def accept(self, probability: float, position: int, child: int) -> bool:
        """Compare with a uniform of stream ACCEPT, which is never 0 and never 1."""
        return bool(uniform(self.seed, position, child, Stream.ACCEPT, self.prefix_len) < probability)

    def recover(self, probs: FloatArray, position: int) -> int:
        """Return argmax(log probs + noise of stream RECOVER); ties go to the lowest id."""
        noise = gumbel(self.seed, position, np.arange(len(probs)), Stream.RECOVER, self.prefix_len)
        with np.errstate(divide="ignore"):
            return int((np.log(probs) + noise).argmax())


def accept_coupled(tree: TokenTree, target_tokens: Sequence[int]) -> AcceptedPath:
    """Descend while the target's own pick is a child; the first pick that is none is the next token.

    picks: (m + 1,) — the target's pick at every node, argmax(log p + noise).
    Invariant: the emitted tokens are those that the target alone would have drawn with this noise,
    whatever the tree.
    Source: docs/losslessness.md; Daliri et al. 2024, arXiv:2408.07978 (communication-free coupling).
    """
    path: list[int] = []
    node = 0
    while (child := tree.children[node].get(target_tokens[node])) is not None:
        path.append(child)
        node = child
    return AcceptedPath(tuple(path), target_tokens[node])


def accept_rejection(
    tree: TokenTree, p: FloatArray, q: FloatArray | None, prefix_len: int, draws: Draws
) -> AcceptedPath:
    """Try the children of a node in order; descend to the first that is accepted, else recover from what is left.

    p: (m + 1, V), the target's distribution at every node. q: (m + 1, V), the drafter's at every node, from which the
    node's children were drawn without replacement; None: they were chosen, whatever way.
    Invariant: the emitted tokens have the target's law. A chosen child y is accepted with p(y), else p loses y; a drawn one
    with min(1, p(y) / q(y)), else p becomes norm(max(p − q, 0)) and q loses y.
    Source: Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1; siblings: Li et al. 2024, arXiv:2401.15077, and
    Miao et al. 2023, arXiv:2305.09781 (multi-round).
    """
    path: list[int] = []
    node, position = 0, prefix_len
    while True:
        left, drafted = p[node], None if q is None else q[node]
        for number, (token, child) in enumerate(tree.children[node].items()):
            if draws.accept(_chance(left, drafted, token), position, number):
                path.append(child)
                node, position = child, position + 1
                break
            left, drafted = _rejected(left, drafted, token)
        else:
            return AcceptedPath(tuple(path), draws.recover(left, position))


def accept_block(tree: TokenTree, p: FloatArray, q: FloatArray, prefix_len: int, draws: Draws) -> AcceptedPath:
    """Accept the longest beginning of a chain that its joint probability allows.

    tree: a chain of γ nodes. p: (γ + 1, V). q: (γ + 1, V), row i the distribution that node i + 1 was drawn from; for
    a chosen one the point mass on it.
    Invariant: the emitted tokens have the target's law, and no fewer are accepted, in expectation, than by rejection.
    Source: Sun et al. 2024, arXiv:2403.10444, Algorithm 2.
    """
    tokens = tree.tokens.tolist()
    num_accepted, joint, weight = 0, 1.0, 1.0
    for depth, token in enumerate(tokens, start=1):
        joint = min(joint * p[depth - 1, token] / q[depth - 1, token], 1.0)
        last = depth == len(tokens)
        if draws.accept(joint if last else _block_chance(joint, p[depth], q[depth]), prefix_len + depth - 1, 0):
            num_accepted, weight = depth, joint
    left = p[num_accepted]
    if num_accepted < len(tokens):
        left = np.maximum(weight * left - q[num_accepted], 0.0)
    return AcceptedPath(tuple(range(1, num_accepted + 1)), draws.recover(left, prefix_len + num_accepted))


def accept_typical(
    tree: TokenTree, p: FloatArray, prefix_len: int, draws: Draws, epsilon: float = EPSILON, delta: float = DELTA
) -> AcceptedPath:
    """LOSSY: accept every child that is probable enough where it stands, and of the paths the longest.

    p: (m + 1, V). A child y is accepted when p(y) > min(ε, δ·exp(−H(p))). Of paths of one length the likeliest.
    Invariant: none; the emitted tokens do not have the target's law.
    Source: Cai et al. 2024, arXiv:2401.10774, section 2.3.1.
    """
    limits = np.array([min(epsilon, delta * np.exp(-_entropy(row))) for row in p])
    probs = p[tree.parents, tree.tokens]
    values = np.log(probs, where=probs > limits[tree.parents], out=np.full(tree.num_nodes, -np.inf))
    path = longest_path(tree, values.tolist())
    return AcceptedPath(path, draws.recover(p[path[-1] if path else 0], prefix_len + len(path)))


def longest_path(tree: TokenTree, values: Sequence[float]) -> tuple[int, ...]:
    """Return the longest path of accepted nodes; of equals the likeliest, then the one that ends in the lowest node.

    values: (m,), of nodes 1…m log p(y) if the node is accepted, else −inf.
    """
    paths: dict[int, tuple[tuple[int, ...], float]] = {0: ((), 0.0)}
    for node, (parent, value) in enumerate(zip(tree.parents.tolist(), values, strict=True), start=1):
        if parent in paths and value > -np.inf:
            path, log_likelihood = paths[parent]
            paths[node] = (*path, node), log_likelihood + value
    return max(paths.values(), key=lambda found: (len(found[0]), found[1]))[0]


def _chance(left: FloatArray, drafted: FloatArray | None, token: int) -> float:
    return float(left[token]) if drafted is None else min(1.0, float(left[token] / drafted[token]))


def _rejected(left: FloatArray, drafted: FloatArray | None, token: int) -> tuple[FloatArray, FloatArray | None]:
    """Return p and q of the trials that follow a rejection, both renormalised."""
    without = np.arange(len(left)) != token
    if drafted is None:
        return _norm(np.where(without, left, 0.0)), None
    return _norm(np.maximum(left - drafted, 0.0)), _norm(np.where(without, drafted, 0.0))


def _norm(weights: FloatArray) -> FloatArray:
    """Renormalise; nothing left stays nothing (its token was accepted for certain, or will not be asked for)."""
    total = weights.sum()
    return weights / total if total > 0 else weights


def _block_chance(joint: float, p: FloatArray, q: FloatArray) -> float:
    gain = float(np.maximum(joint * p - q, 0.0).sum())
    left = gain + (1.0 - joint)  # in this order a small gain is not lost beside 1
    return gain / left if left > 0 else 1.0


def _entropy(probs: FloatArray) -> float:
    kept = probs[probs > 0]
    return float(-(kept * np.log(kept)).sum())
