"""How good heads are: ranks of the right tokens, and from them accuracies and acceptance lengths; it trains nothing.

All that follows from ranks is pure. ranks: (B, m, D) int64: how many tokens head-depth j = 1 … D put before the right
one at row i, given that all before it were right.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from build.data import Tokens
from build.heads.places import all_places
from build.heads.target import Batch, FrozenTarget
from build.heads.trees import Path, Tree, best_tree, chain
from build.heads.unroll import unroll
from build.losses import spread_windows

Ranks = npt.NDArray[np.int64]

DEPTH = 6
TOP_K = (1, 2, 4, 8)
TREE_NODES = (8, 24)
WINDOW = 512
PROMPT_TOKENS = 128
GREEDY_TOKENS = 128
ROWS_AT_ONCE = 8


class Recorded(NamedTuple):
    """The target's states on some windows, of which the rows from `first` on count."""

    batches: list[Batch]
    first: int = 0


@torch.no_grad()
def ranks_of(head: nn.Module, batch: Batch, depth: int = DEPTH) -> Ranks:
    """The ranks of the batch's own tokens; one that a draft vocabulary lacks ranks behind all."""
    places = all_places(batch.num_rows, depth, batch.last.device)
    columns = _columns(head, batch.p.shape[-1]).to(batch.tokens.device)
    ranks = []
    for place, logits in enumerate(unroll(head, batch, places, depth), start=1):
        column = columns[places.take(batch.tokens, place + 1)]  # (B, m)
        right = logits.gather(-1, column.clamp(min=0)[..., None])
        rank = (logits > right).sum(-1).masked_fill(column < 0, batch.p.shape[-1])
        ranks.append(rank.cpu().numpy())
    return np.stack(ranks, axis=-1).astype(np.int64)


def accuracies(ranks: Ranks) -> list[dict[str, float]]:
    """Per depth the share of rows whose right token is among the head's k best."""
    flat = ranks.reshape(-1, ranks.shape[-1])
    return [{f"top{k}": round(float((flat[:, j] < k).mean()), 4) for k in TOP_K} for j in range(flat.shape[1])]


def acceptance_length(ranks: Ranks, tree: Tree) -> float:
    """Mean tokens of a step, the target's own included, on walks through the rows, drafting a static tree each time.

    A step at row i accepts the longest path of the tree that the ranks follow, a tokens, and the next is at i + a + 1.
    """
    accepted = np.array([_accepted(path, tree) for path in _paths(ranks)]).reshape(ranks.shape[:2])
    return accepted.size / sum(_steps(row) for row in accepted)


def measure(head: nn.Module, recorded: Recorded) -> dict[str, Any]:
    """Accuracies and acceptance lengths on recorded states; trees are grown on one half, measured on the other."""
    ranks = np.concatenate([ranks_of(head, batch) for batch in recorded.batches])[:, recorded.first :]
    grown_on, measured_on = ranks[0::2], ranks[1::2]
    depth = ranks.shape[-1]
    lengths = {f"chain of {depth}": acceptance_length(ranks, chain(depth))}
    for nodes in TREE_NODES:
        tree = best_tree(_hits(grown_on), nodes)
        lengths[f"tree of {nodes}"] = acceptance_length(measured_on if len(measured_on) else ranks, tree)
    return {
        "accuracy": accuracies(ranks),
        # Of each rank alone; what a static tree is grown on (orchestrator/core/static_trees.py).
        "hits": [[round(float(share), 4) for share in row] for row in _hits(ranks)],
        "acceptance_length": {name: round(length, 3) for name, length in lengths.items()},
        "places": int(ranks[..., 0].size),
    }


def record_text(target: FrozenTarget, stream: Tokens, windows: int) -> Recorded:
    """The target's states on text that nothing was trained on, windows spread over all of it."""
    length = min(WINDOW, len(stream) - 1)
    return Recorded(_read(target, torch.cat(list(spread_windows(stream, windows, length)))))


def record_greedy(target: FrozenTarget, stream: Tokens, windows: int) -> Recorded:
    """The target's states on its own most likely continuations of held-out text: what heads meet in service."""
    length = min(PROMPT_TOKENS, (len(stream) - 1) // 2)
    prompts = torch.cat(list(spread_windows(stream, windows, length)))[:, :length]
    tokens = target.continued(prompts.to(target.device), GREEDY_TOKENS)
    return Recorded(_read(target, tokens), first=length - 1)


def _read(target: FrozenTarget, tokens: Tensor) -> list[Batch]:
    batches = (target.read(part.to(target.device)) for part in tokens.split(ROWS_AT_ONCE))
    return [batch._replace(p=batch.p[:, :1].clone()) for batch in batches]  # p is large; only its width is read


def _columns(head: nn.Module, vocab_size: int) -> Tensor:
    """Column of each token among the head's logits, −1 where it has none, (V,)."""
    ids = getattr(head, "ids", None)
    if ids is None:
        return torch.arange(vocab_size)
    columns = torch.full((vocab_size,), -1)
    columns[ids.cpu()] = torch.arange(len(ids))
    return columns


def _hits(ranks: Ranks) -> npt.NDArray[np.float64]:
    """Share of rows whose right token at depth j ranks r-th, (D, TOP_K[-1])."""
    flat = ranks.reshape(-1, ranks.shape[-1])
    return np.array([[(flat[:, j] == r).mean() for r in range(max(TOP_K))] for j in range(flat.shape[1])])


def _paths(ranks: Ranks) -> Iterator[Path]:
    return map(tuple, ranks.reshape(-1, ranks.shape[-1]).tolist())


def _accepted(path: Path, tree: Tree) -> int:
    return next(length for length in count() if length == len(path) or path[: length + 1] not in tree)


def _steps(accepted: npt.NDArray[np.int64]) -> int:
    """How many steps a walk over a row of accepted lengths takes."""
    place = steps = 0
    while place < len(accepted):
        place += int(accepted[place]) + 1
        steps += 1
    return steps
