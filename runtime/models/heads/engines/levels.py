"""The next level of draft trees, from a drafter's logits: its best tokens, or tokens sampled from q."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from orchestrator.core.errors import EngineError
from orchestrator.core.messages.drafter import DraftRequest
from runtime.engine.calls import DraftedTree, EngineCall
from runtime.engine.sampling.drafts import candidates
from runtime.engine.staging import fetch
from runtime.models.heads.engines.ranking import rank
from runtime.models.heads.engines.sampled import sampled_children
from runtime.models.heads.sharpness import Sharpness


class Level(NamedTuple):
    """A draft whose next level is due.

    logits: (r, V), a row per candidate of its frontier or one for all of them.
    """

    call: EngineCall[DraftRequest]
    draft: DraftedTree
    logits: Tensor


def check_draws(request: DraftRequest) -> None:
    """Raise EngineError if children should be sampled although the request's rule does not read q."""
    sampling = request.sampling
    if request.head.draws and (sampling.greedy or not sampling.rule.uses_q):
        raise EngineError(f"draws is for a temperature above 0 and a rule that reads q, not for {sampling.rule!r}")


def add_level(levels: Sequence[Level], sharpness: Sharpness, ids: Tensor | None = None) -> None:
    """Add the children of all frontiers; a child of a candidate at depth t has position prefix_len + t.

    sharpness: the drafter's. ids: (V,) int64, the token of each column of the logits; None means 0 … V − 1.
    """
    if sampled := [level for level in levels if level.call.request.head.draws]:
        _add_sampled(sampled, sharpness, ids)
    if chosen := [level for level in levels if not level.call.request.head.draws]:
        _add_best(chosen, sharpness, ids)


def _add_best(chosen: Sequence[Level], sharpness: Sharpness, ids: Tensor | None) -> None:
    """Add the best children below the frontiers of these drafts."""
    owners = [(call.request, call.delta.prefix_len + draft.tree.depth) for call, draft, rows in chosen for _ in rows]
    best = rank(
        torch.cat([rows for *_, rows in chosen]),
        [position for _, position in owners],
        [request.sampling for request, _ in owners],
        max(draft.tree.fan_out for _, draft, _ in chosen),
        ids,
        [sharpness.of(request.head, request.sampling) for request, _ in owners],
    )
    tokens, scores = fetch(best)
    first = 0
    for _, draft, rows in chosen:
        own, columns = slice(first, first + len(rows)), slice(draft.tree.fan_out)
        times = len(draft.tree.frontier) // len(rows)
        first += len(rows)
        draft.tree.add_children(tokens[own, columns].repeat(times, 0), scores[own, columns].repeat(times, 0))


def _add_sampled(sampled: Sequence[Level], sharpness: Sharpness, ids: Tensor | None) -> None:
    """Add children below the frontiers of these drafts, sampled from q."""
    samplings = [call.request.sampling for call, _, rows in sampled for _ in rows]
    found = iter(candidates(torch.cat([rows for *_, rows in sampled]), samplings, ids))
    for call, draft, rows in sampled:
        tree, prefix_len = draft.tree, call.delta.prefix_len
        sharp = sharpness.of(call.request.head, call.request.sampling)
        own, position, fan_out = list(islice(found, len(rows))), prefix_len + tree.depth, tree.fan_out
        q = dict(zip(tree.frontier, own * (len(tree.frontier) // len(own)), strict=True))
        children = [
            sampled_children(each, position, call.request.sampling, prefix_len, fan_out, node, sharp)
            for node, each in q.items()
        ]
        draft.q |= q
        tree.add_children(*(np.concatenate(arrays) for arrays in zip(*children, strict=True)))
