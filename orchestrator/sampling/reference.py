"""The truth that every method and engine is compared with, slow and obvious: one row at a time, numpy, float64."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import numpy as np

from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Distribution, FloatArray
from orchestrator.sampling.accept import (
    AcceptedPath,
    KeyedDraws,
    accept_block,
    accept_coupled,
    accept_rejection,
    accept_typical,
)
from orchestrator.sampling.distribution import log_p, pick
from orchestrator.sampling.logits_processors import BoolArray, shape

Logits = Callable[[Sequence[int]], FloatArray]
Legal = Callable[[Sequence[int]], BoolArray]


def generate(
    logits: Logits,
    prompt: Sequence[int],
    sampling: Sampling,
    max_tokens: int,
    stop_ids: Container[int] = (),
    legal: Legal | None = None,
) -> list[int]:
    """Return the tokens that the target says after `prompt`, one forward pass each.

    logits: ids of a prefix → (V,) float64, the logits of the token that follows it. legal: tokens of the output → (V,)
    bool, what the grammar allows behind them.
    Invariant: at most max_tokens tokens; the first stop id ends the output and is its last token.
    """
    output: list[int] = []
    while len(output) < max_tokens:
        row = shape(logits([*prompt, *output]), prompt, output, sampling, legal and legal(output))
        output.append(int(pick(row[None], np.array([len(prompt) + len(output)]), sampling)[0]))
        if output[-1] in stop_ids:
            break
    return output


def shaped_rows(
    logits: FloatArray,
    tree: TokenTree,
    prompt: Sequence[int],
    output: Sequence[int],
    sampling: Sampling,
    legal: Legal | None = None,
) -> FloatArray:
    """Return the logits of the root and every node as the request wants them, each by its own path; (m + 1, V)."""
    paths = [[*output, *path] for path in tree.paths]
    rows = [shape(row, prompt, path, sampling, legal and legal(path)) for row, path in zip(logits, paths, strict=True)]
    return np.stack(rows)


def decide(
    logits: FloatArray, tree: TokenTree, q: tuple[Distribution, ...], prefix_len: int, sampling: Sampling
) -> AcceptedPath:
    """Return what a step accepts, by the request's rule.

    logits: (m + 1, V), shaped. q: what the nodes were drawn from; empty = chosen. prefix_len: of the step.
    """
    if sampling.rule is Rule.COUPLED:
        return accept_coupled(tree, pick(logits, prefix_len + tree.depths, sampling).tolist())
    p, draws = np.exp(log_p(logits, sampling)), KeyedDraws(sampling.seed, prefix_len)
    if sampling.rule is Rule.TYPICAL:
        return accept_typical(tree, p, prefix_len, draws, sampling.epsilon, sampling.delta)
    if sampling.rule is Rule.BLOCK:
        return accept_block(tree, p, dense_q(tree, q or point_masses(tree), p.shape[1]), prefix_len, draws)
    return accept_rejection(tree, p, dense_q(tree, q, p.shape[1]) if q else None, prefix_len, draws)


def dense_q(tree: TokenTree, q: tuple[Distribution, ...], vocab_size: int) -> FloatArray:
    """Return (m + 1, V): at every node what its children were drawn from, zeros where it has none."""
    rows = np.zeros((tree.num_nodes + 1, vocab_size))
    for parent, drawn_from in zip(tree.parents.tolist(), q, strict=True):
        rows[parent, drawn_from.ids] = drawn_from.probs
    return rows


def point_masses(tree: TokenTree) -> tuple[Distribution, ...]:
    """Return the q of a chosen chain: certainty."""
    return tuple(Distribution(tree.tokens[i : i + 1], np.ones(1, np.float32)) for i in range(tree.num_nodes))
