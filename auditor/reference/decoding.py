"""The reference for every method and engine, slow and obvious: one row at a time, numpy, float64."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import numpy as np

from auditor.reference.distribution import log_p, sample
from auditor.reference.elementary import exp
from auditor.reference.logits_processors import process_logits
from auditor.reference.rules import KeyedNoise, accept_block, accept_rejection, accept_typical
from orchestrator.core.accept import AcceptedPath, accept_coupled
from orchestrator.core.arrays import BoolArray, FloatArray
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Distribution

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
    """Return the tokens that the target alone generates after `prompt`, with one forward pass for each.

    logits: prefix ids → (V,) float64, the logits of the token after them.
    legal: output tokens → (V,) bool, the tokens that the grammar allows after them.
    Invariant: at most max_tokens tokens; the first stop id ends the output and is its last token.
    """
    output: list[int] = []
    while len(output) < max_tokens:
        row = process_logits(logits([*prompt, *output]), prompt, output, sampling, legal and legal(output))
        output.append(int(sample(row[None], np.array([len(prompt) + len(output)]), sampling)[0]))
        if output[-1] in stop_ids:
            break
    return output


def process_tree_logits(
    logits: FloatArray,
    tree: TokenTree,
    prompt: Sequence[int],
    output: Sequence[int],
    sampling: Sampling,
    legal: Legal | None = None,
) -> FloatArray:
    """Return the processed logits of the root and of every node, each processed along its own path.

    logits: (m + 1, V) float64. legal: as in `generate`.
    Returns (m + 1, V) float64.
    """
    outputs = [[*output, *path] for path in tree.paths]
    return np.stack(
        [
            process_logits(row, prompt, output, sampling, legal and legal(output))
            for row, output in zip(logits, outputs, strict=True)
        ]
    )


def decide(
    logits: FloatArray, tree: TokenTree, q: tuple[Distribution, ...], prefix_len: int, sampling: Sampling
) -> AcceptedPath:
    """Return the path that a step accepts under the request's rule.

    logits: (m + 1, V) float64, processed.
    q: the distribution from which each of the nodes 1…m was sampled; empty: deterministic drafts.
    prefix_len: number of committed tokens before the step.
    """
    if sampling.rule is Rule.COUPLED:
        return accept_coupled(tree, sample(logits, prefix_len + tree.depths, sampling).tolist())
    p, noise = exp(log_p(logits, sampling)), KeyedNoise(sampling.seed, prefix_len)
    if sampling.rule is Rule.TYPICAL:
        return accept_typical(tree, p, prefix_len, noise, sampling.epsilon, sampling.delta)
    if sampling.rule is Rule.BLOCK:
        point_masses = (Distribution(np.array([token], np.int32), np.ones(1, np.float32)) for token in tree.tokens)
        return accept_block(tree, p, dense_q(tree, q or tuple(point_masses), p.shape[1]), prefix_len, noise)
    return accept_rejection(tree, p, dense_q(tree, q, p.shape[1]) if q else None, prefix_len, noise)


def dense_q(tree: TokenTree, q: tuple[Distribution, ...], vocab_size: int) -> FloatArray:
    """Return q by parent: row i is the distribution of the children of node i, zeros if it has none.

    q: one distribution for each of the nodes 1…m. Returns (m + 1, V) float64.
    """
    rows = np.zeros((tree.num_nodes + 1, vocab_size))
    for parent, node_q in zip(tree.parents.tolist(), q, strict=True):
        rows[parent, node_q.ids] = node_q.probs
    return rows
