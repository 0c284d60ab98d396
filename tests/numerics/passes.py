"""One text led through the target in one dtype, and two dtypes compared step by step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from orchestrator.core.arrays import FloatArray
from orchestrator.core.context import Context
from orchestrator.core.drafting import Limits
from orchestrator.core.messages.context import delta_of
from orchestrator.core.noise import gumbel
from orchestrator.core.proposal import Proposer
from orchestrator.core.sampling import distribution as reference
from orchestrator.core.sampling.accept import AcceptedPath, accept_coupled
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance
from runtime.engine.kv.batch import Segment
from runtime.engine.paged import PagedModel
from runtime.engine.sampling import served
from runtime.engine.target import TargetEngine
from runtime.models.load import load_model
from tests.numerics.counts import CLOSE, EXACT, NUM_TOP, Tally
from tests.support.exactness import border_distance


class Forced:
    """The target in one dtype, led along a text that another one says, by the engine's own passes and commits."""

    def __init__(self, folder: str, device: str, dtype: str) -> None:
        self.paged = PagedModel(load_model(folder, device, dtype), 96, 16)
        self._engine = TargetEngine(self.paged)

    def begin(self, context: Context) -> None:
        """Start a text afresh."""
        self.paged.sequences.drop(1)
        self._sequence = self.paged.sequences.open(delta_of(context, 0, 1, ""), 0, 0)

    def rows(self, tree: TokenTree) -> Tensor:
        """Return the logits of the root and every node, (m + 1, V), in the dtype; a long prompt goes in by parts."""
        sequence, part = self._sequence, self.paged.max_pass_tokens
        stop = len(sequence.ids)
        sequence.reserve(stop + tree.num_nodes)
        while stop - sequence.num_computed > part:
            first = sequence.num_computed
            self.paged.forward([Segment(sequence, first, first + part)])
        return self.paged.forward([Segment(sequence, sequence.num_computed, stop, tree)])

    def commit(self, tree: TokenTree, accepted: AcceptedPath) -> None:
        """Keep the path of the step, whatever this dtype would have picked."""
        self._engine.paged.commit([(self._sequence, tree, accepted)])


class Rows(NamedTuple):
    """The picks of one dtype after the root and the nodes of a path, and their logits, (a + 1, V) float64."""

    target_tokens: list[int]
    logits: Tensor


class Step(NamedTuple):
    """A step of float64, and what every dtype made of its path. prompt: its number."""

    prompt: int
    prefix_len: int
    tree: TokenTree
    path: tuple[int, ...]
    rows: dict[str, Rows]


def follow(
    sides: Mapping[str, Forced], proposer: Proposer, context: Context, rule: Sampling, limits: Limits, end: int
) -> Iterator[tuple[TokenTree, AcceptedPath, dict[str, Rows]]]:
    """Yield the steps of float64's own text up to the token `end`, before they are committed; all sides go along."""
    for side in sides.values():
        side.begin(context)
    while len(context.output) < limits.max_tokens and end not in context.output:
        budget = limits.budget(context)
        tree = proposer.propose(context, rule, budget).cut(budget).tree
        logits = {name: side.rows(tree) for name, side in sides.items()}
        target_tokens = served.target_tokens(
            logits[EXACT], (tree.depths + len(context)).tolist(), [rule] * (tree.num_nodes + 1)
        )
        accepted = accept_coupled(tree, target_tokens)
        rows = {name: _on_path(own, accepted.path, len(context), rule) for name, own in logits.items()}
        yield tree, accepted, rows
        for side in sides.values():
            side.commit(tree, accepted)
        acceptance = Acceptance(accepted.path, accepted.next_token, target_tokens=np.array(target_tokens, np.int32))
        context.commit(acceptance.tokens(tree))
        proposer.observe(tree, acceptance)


def _on_path(logits: Tensor, path: tuple[int, ...], prefix_len: int, rule: Sampling) -> Rows:
    own = logits[[0, *path]]
    target_tokens = served.target_tokens(own, range(prefix_len, prefix_len + len(own)), [rule] * len(own))
    return Rows(target_tokens, own.double().cpu())


def compare(step: Step, left: Rows, right: Rows, rule: Sampling) -> Tally:
    """Return what came of one step's picks by two dtypes, or by a tree and plain decoding."""
    exact, nodes = step.rows[EXACT].logits, [0, *step.path]
    apart = [i for i, (a, b) in enumerate(zip(left.target_tokens, right.target_tokens, strict=True)) if a != b]
    tally = Tally(len(nodes), len(apart), 1, int(bool(apart)), **_distances(exact, left.logits, right.logits))
    if apart:
        first = apart[0]
        tally.paths = int(
            bool({left.target_tokens[first], right.target_tokens[first]} & step.tree.children[nodes[first]].keys())
        )
    if not rule.greedy:
        each = [rule] * len(nodes)
        tally.chance = float(
            chance_of_difference(served.log_p(left.logits, each), served.log_p(right.logits, each)).sum()
        )
    for i in apart:
        position, logits = step.prefix_len + i, exact[i : i + 1].numpy()
        gap = margin(logits, left.target_tokens[i], right.target_tokens[i], position, rule)
        tally.margins.append([step.prompt, position, gap])
    return tally


def _distances(exact: Tensor, left: Tensor, right: Tensor) -> dict[str, Any]:
    """Return how far two logits, (n, V), lie apart, and how near float64's two likeliest tokens are to each other."""
    top = exact.topk(min(NUM_TOP, exact.shape[-1]), dim=-1).indices
    a, b = (logits.log_softmax(dim=-1).gather(-1, top) for logits in (left, right))
    deltas, gaps = (a - b).abs(), ((a - b)[:, 0] - (a - b)[:, 1]).abs()
    keys, counts = (20 * deltas.clamp(min=1e-20).log10()).ceil().int().unique(return_counts=True)
    close = exact.topk(2, dim=-1).values
    return {
        "deltas": {str(key): count for key, count in zip(keys.tolist(), counts.tolist(), strict=True)},
        "largest": float(deltas.max()),
        "gaps": float(gaps.sum()),
        "close": int((close[:, 0] - close[:, 1] < CLOSE).sum()),
    }


def chance_of_difference(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the probability, over seeds, that the picks of p and of q differ under the same noise; (n, V) → (n,).

    1 − Σᵢ 1 / Σⱼ max(pⱼ/pᵢ, qⱼ/qᵢ), the sum over j by the order of qⱼ/pⱼ (Daliri et al. 2024, arXiv:2408.07978).
    """
    order = (log_q - log_p).nan_to_num(0.0, torch.inf, -torch.inf).argsort(dim=-1)
    p, q = log_p.exp().gather(-1, order), log_q.exp().gather(-1, order)
    behind = q.flip(-1).cumsum(-1).flip(-1) - q
    same = 1 / (p.cumsum(-1) / p + behind / q)
    return (1 - same.nan_to_num(0.0).sum(-1)).clamp(min=0.0)


def margin(row: FloatArray, left: int, right: int, position: int, rule: Sampling) -> float:
    """Return float64's distance between two picks, or of one from top-p's border; row: (1, V) logits."""
    if rule.greedy:
        return float(abs(row[0, left] - row[0, right]))
    scores = reference.log_p(row, rule)[0] + gumbel(rule.seed, position, np.arange(row.shape[1]))
    outside = [token for token in (left, right) if not np.isfinite(scores[token])]
    if outside:
        return max(border_distance(row, token, rule) for token in outside)
    return float(abs(scores[left] - scores[right]))
