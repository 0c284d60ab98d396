"""How good heads are: ranks of the right tokens, and from them accuracies and acceptance lengths.

ranks: (B, m, D) int64, how many tokens a head at depth j = 1 … D puts before the right one at row i, given that all
tokens before it are right. A tree is the set of its nodes, each given by the ranks on the path to it.
"""

from __future__ import annotations

from collections.abc import Set
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from build.data import Tokens
from build.heads.target import Batch, FrozenTarget
from build.heads.teacher_forcing import all_rows, draft_logits
from build.losses import spread_windows
from orchestrator.core.static_trees import best_choices

Ranks = npt.NDArray[np.int64]
Tree = Set[tuple[int, ...]]

DEPTH = 6
TOP_K = (1, 2, 4, 8)
TREE_NODES = (8, 24)
WINDOW = 512
PROMPT_TOKENS = 128
GREEDY_TOKENS = 128
BATCH_ROWS = 8


class Recorded(NamedTuple):
    """The target's states on some windows. first: the first row that is measured."""

    batches: list[Batch]
    first: int = 0


def record_text(target: FrozenTarget, stream: Tokens, windows: int) -> Recorded:
    """Record the target's states on held-out text, in windows spread over all of it."""
    length = min(WINDOW, len(stream) - 1)
    return Recorded(_read(target, torch.cat(list(spread_windows(stream, windows, length)))))


def record_greedy(target: FrozenTarget, stream: Tokens, windows: int) -> Recorded:
    """Record the target's states on its greedy continuations of held-out text, which is what heads draft in service."""
    length = min(PROMPT_TOKENS, (len(stream) - 1) // 2)
    prompts = torch.cat(list(spread_windows(stream, windows, length)))[:, :length]
    tokens = target.continued(prompts.to(target.device), GREEDY_TOKENS)
    return Recorded(_read(target, tokens), first=length - 1)


def _read(target: FrozenTarget, tokens: Tensor) -> list[Batch]:
    batches = (target.read(part.to(target.device)) for part in tokens.split(BATCH_ROWS))
    return [batch._replace(p=batch.p[:, :1].clone()) for batch in batches]  # p is large; only its width is read


def measure(head: nn.Module, recorded: Recorded) -> dict[str, Any]:
    """Return accuracies and acceptance lengths; trees are built from one half of the windows, measured on the other."""
    ranks = np.concatenate([ranks_of(head, batch) for batch in recorded.batches])[:, recorded.first :]
    built_from, measured_on = ranks[0::2], ranks[1::2]
    depth = ranks.shape[-1]
    lengths = {f"chain of {depth}": acceptance_length(ranks, chain(depth))}
    for nodes in TREE_NODES:
        tree = best_tree(_hits(built_from), nodes)
        lengths[f"tree of {nodes}"] = acceptance_length(measured_on if len(measured_on) else ranks, tree)
    return {
        "accuracy": accuracies(ranks),
        # By depth and rank; static trees are built from these (orchestrator/core/static_trees.py).
        "hits": [[round(float(share), 4) for share in row] for row in _hits(ranks)],
        "acceptance_length": {name: round(length, 3) for name, length in lengths.items()},
        "places": int(ranks[..., 0].size),
    }


@torch.no_grad()
def ranks_of(head: nn.Module, batch: Batch, depth: int = DEPTH) -> Ranks:
    """Return the ranks of the batch's own tokens; a token outside a draft vocabulary ranks last."""
    roots = all_rows(batch.num_rows, depth, batch.last.device)
    columns = draft_columns(head, batch.p.shape[-1]).to(batch.tokens.device)
    ranks = []
    for j, logits in enumerate(draft_logits(head, batch, roots, depth), start=1):
        column = columns[roots.take(batch.tokens, j + 1)]  # (B, m)
        right = logits.gather(-1, column.clamp(min=0)[..., None])
        rank = (logits > right).sum(-1).masked_fill(column < 0, batch.p.shape[-1])
        ranks.append(rank.cpu().numpy())
    return np.stack(ranks, axis=-1).astype(np.int64)


def draft_columns(head: nn.Module, vocab_size: int) -> Tensor:
    """Return the column of each token in the head's logits, −1 if it has none, (V,) int64."""
    ids = getattr(head, "ids", None)
    if ids is None:
        return torch.arange(vocab_size)
    columns = torch.full((vocab_size,), -1)
    columns[ids.cpu()] = torch.arange(len(ids))
    return columns


def accuracies(ranks: Ranks) -> list[dict[str, float]]:
    """Return, by depth, the share of rows whose right token is among the head's k best."""
    flat = ranks.reshape(-1, ranks.shape[-1])
    return [{f"top{k}": round(float((flat[:, j] < k).mean()), 4) for k in TOP_K} for j in range(flat.shape[1])]


def _hits(ranks: Ranks) -> npt.NDArray[np.float64]:
    """Return the share of rows whose right token at depth j has rank r, (D, TOP_K[-1]) float64."""
    flat = ranks.reshape(-1, ranks.shape[-1])
    return np.array([[(flat[:, j] == r).mean() for r in range(max(TOP_K))] for j in range(flat.shape[1])])


def chain(depth: int) -> Tree:
    """Return the tree of the best guess at each depth."""
    return {(0,) * length for length in range(1, depth + 1)}


def best_tree(hits: npt.NDArray[np.float64], num_nodes: int) -> Tree:
    """Return the tree that would accept the most tokens if depths were independent (arXiv:2401.10774, section 2.3.3).

    hits: (D, R) float64, the share of rows whose right token at depth j has rank r.
    """
    return set(best_choices(hits, num_nodes).paths[1:])


def acceptance_length(ranks: Ranks, tree: Tree) -> float:
    """Return the mean tokens a step, the target's own included, when each window is decoded with a static tree.

    A step at row i accepts the longest path of the tree that the ranks follow, a tokens; the next step is at i + a + 1.
    """
    num_steps = 0
    for window in ranks.tolist():
        row = 0
        while row < len(window):
            row += _num_accepted(tuple(window[row]), tree) + 1
            num_steps += 1
    return float(ranks[..., 0].size / num_steps)


def _num_accepted(path: tuple[int, ...], tree: Tree) -> int:
    return next(length for length in count() if length == len(path) or path[: length + 1] not in tree)
