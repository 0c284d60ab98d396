"""The rules `rejection`, `block` and `typical` over a token tree, as pure functions: each returns what is accepted.

They need the target's distribution p at every node, and random decisions from a `NoiseSource`: keyed noise as requests
have it, while the tests enumerate every outcome of the same code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from auditor.reference.elementary import exp, log
from auditor.reference.noise import gumbel, uniform
from orchestrator.core.accept import AcceptedPath, longest_path
from orchestrator.core.arrays import FloatArray, total
from orchestrator.core.noise import Stream
from orchestrator.core.sampling_params import DELTA, EPSILON
from orchestrator.core.tree import TokenTree


class NoiseSource(Protocol):
    """The random decisions of a rule. position: the index, in the whole sequence, of the token being decided."""

    def accept(self, probability: float, position: int, child: int) -> bool:
        """Return True with this probability: always for 1, never for 0. child: the trial's number at this position."""

    def recover(self, probs: FloatArray, position: int) -> int:
        """Return a token sampled from probs, (V,) float64, which need not sum to 1."""


@dataclass(frozen=True)
class KeyedNoise:
    """Noise keyed by seed, position, token and step (docs/wire.md, Noise).

    prefix_len: identifies the step. Without it in the key, the step after a rejection would decide the same position
    with the same noise again.
    """

    seed: int
    prefix_len: int

    def accept(self, probability: float, position: int, child: int) -> bool:
        """Compare the probability with a uniform number of stream ACCEPT, which is never 0 and never 1."""
        return bool(uniform(self.seed, position, child, Stream.ACCEPT, self.prefix_len) < probability)

    def recover(self, probs: FloatArray, position: int) -> int:
        """Return argmax(log probs + noise of stream RECOVER); ties go to the lowest id."""
        noise = gumbel(self.seed, position, np.arange(len(probs)), Stream.RECOVER, self.prefix_len)
        return int((log(probs) + noise).argmax())


def accept_rejection(
    tree: TokenTree, p: FloatArray, q: FloatArray | None, prefix_len: int, noise: NoiseSource
) -> AcceptedPath:
    """Try the children of a node in order; descend to the first accepted one, or sample from the residual.

    p: (m + 1, V) float64, the target's distribution at every node.
    q: (m + 1, V) float64, the distribution from which the children of every node were sampled without replacement;
    None: deterministic drafts.
    Invariant: the emitted tokens have the target's distribution. A deterministic child y is accepted with probability
    p(y) divided by the mass that its earlier siblings leave; the residual is p without the children. A sampled child is
    accepted with probability p(y) / q(y); on rejection p becomes norm(max(p − q, 0)), q(y) becomes 0, and q is
    renormalised.
    Source: Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1; siblings: Li et al. 2024, arXiv:2401.15077, and
    Miao et al. 2023, arXiv:2305.09781 (multi-round).
    """
    path: list[int] = []
    node, position = 0, prefix_len
    while True:
        tokens = list(tree.children[node])
        trials = _deterministic(p[node], tokens) if q is None else _sampled(p[node], q[node], tokens)
        for number, token in enumerate(tokens):
            if noise.accept(next(trials)[0], position, number):
                node = tree.children[node][token]
                path.append(node)
                position += 1
                break
        else:
            return AcceptedPath(tuple(path), noise.recover(next(trials)[1], position))


def _deterministic(p: FloatArray, tokens: Sequence[int]) -> Iterator[tuple[float, FloatArray]]:
    """Yield for each child its probability given that its earlier siblings were rejected; finally 0 and the residual.

    The remaining mass is summed from the last child back, not computed as 1 − the siblings' mass, so that the only
    token left is accepted with probability 1.
    """
    residual = p.copy()
    residual[tokens] = 0.0
    masses = [float(total(residual)[0])]
    for token in reversed(tokens):
        masses.append(masses[-1] + float(p[token]))
    for token, mass in zip(tokens, reversed(masses), strict=False):
        yield float(p[token]) / mass if mass > 0.0 else 0.0, residual
    yield 0.0, residual


def _sampled(p: FloatArray, q: FloatArray, tokens: Sequence[int]) -> Iterator[tuple[float, FloatArray]]:
    """Do the same as `_deterministic` for children that were sampled from q without replacement."""
    for token in tokens:
        yield min(1.0, float(p[token] / q[token])), p
        p = _normalised(np.maximum(p - q, 0.0))
        q = _normalised(np.where(np.arange(len(q)) == token, 0.0, q))
    yield 0.0, p


def accept_block(tree: TokenTree, p: FloatArray, q: FloatArray, prefix_len: int, noise: NoiseSource) -> AcceptedPath:
    """Accept the longest prefix of a chain that the joint probability of its tokens allows.

    tree: a chain of γ nodes. p: (γ + 1, V) float64.
    q: (γ + 1, V) float64; row i is the distribution from which node i + 1 was sampled, a point mass for a deterministic
    draft.
    Invariant: the emitted tokens have the target's distribution, and in expectation at least as many drafts are
    accepted as by `rejection`.
    Source: Sun et al. 2024, arXiv:2403.10444, Algorithm 2.
    """
    tokens = tree.tokens.tolist()
    num_accepted, joint, weight = 0, 1.0, 1.0
    for depth, token in enumerate(tokens, start=1):
        joint = min(joint * p[depth - 1, token] / q[depth - 1, token], 1.0)
        is_last = depth == len(tokens)
        if noise.accept(joint if is_last else _block_probability(joint, p[depth], q[depth]), prefix_len + depth - 1, 0):
            num_accepted, weight = depth, joint
    residual = p[num_accepted]
    if num_accepted < len(tokens):
        residual = np.maximum(weight * residual - q[num_accepted], 0.0)
    return AcceptedPath(tuple(range(1, num_accepted + 1)), noise.recover(residual, prefix_len + num_accepted))


def accept_typical(
    tree: TokenTree, p: FloatArray, prefix_len: int, noise: NoiseSource, epsilon: float = EPSILON, delta: float = DELTA
) -> AcceptedPath:
    """LOSSY: accept every child that is probable enough at its node, and return the longest accepted path.

    p: (m + 1, V) float64. A child y is accepted if p(y) > min(ε, δ·exp(−H(p))). Of equally long paths the most probable
    wins. The emitted tokens do not have the target's distribution.
    Source: Cai et al. 2024, arXiv:2401.10774, section 2.3.1.
    """
    limits = np.minimum(epsilon, delta * exp(-_entropy(p)))
    probs = p[tree.parents, tree.tokens]
    log_probs = np.where(probs > limits[tree.parents], log(probs), -np.inf)
    path = longest_path(tree, log_probs.tolist())
    return AcceptedPath(path, noise.recover(p[path[-1] if path else 0], prefix_len + len(path)))


def _normalised(weights: FloatArray) -> FloatArray:
    """Return the weights scaled to sum to 1, or unchanged if all are zero: then they are never used."""
    mass = total(weights)
    return weights / mass if mass[0] > 0 else weights


def _block_probability(joint: float, p: FloatArray, q: FloatArray) -> float:
    gain = float(total(np.maximum(joint * p - q, 0.0))[0])
    mass = gain + (1.0 - joint)  # added in this order, a small gain is not rounded away
    return gain / mass if mass > 0 else 1.0


def _entropy(p: FloatArray) -> FloatArray:
    """Return the entropy of every row, in nats; p: (n, V)."""
    return -total(p * np.where(p > 0, log(p), 0.0))[:, 0]
