"""The next level of draft trees, from a drafter's logits: its best tokens, or tokens sampled from q."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from orchestrator.core.errors import EngineError
from orchestrator.wire.drafter import DraftRequest
from runtime.engine.calls import DraftedTree, EngineCall
from runtime.heads.engines.ranking import rank
from runtime.heads.engines.sampled import sampled_children
from runtime.sampling.drafts import candidates

Drafting = tuple[EngineCall[DraftRequest], DraftedTree]


def check_draws(request: DraftRequest) -> None:
    """Raise EngineError if children should be sampled although the request's rule does not read q."""
    sampling = request.sampling
    if request.head.draws and (sampling.greedy or not sampling.rule.uses_q):
        raise EngineError(f"draws is for a temperature above 0 and a rule that reads q, not for {sampling.rule!r}")


def add_level(
    drafts: Sequence[Drafting],
    logits: Tensor,
    num_rows: Sequence[int],
    sharpness: Sequence[float],
    ids: Tensor | None = None,
) -> None:
    """Add the children of all frontiers; a child of a candidate at depth t has position prefix_len + t.

    logits: (sum of num_rows, V), draft by draft, a row per candidate of the frontier or one for all of them.
    num_rows, sharpness: of each draft. ids: (V,) int64, the token of each column; None means 0 … V − 1.
    """
    owners = [number for number, count in enumerate(num_rows) for _ in range(count)]
    positions = [call.delta.prefix_len + draft.tree.depth for call, draft in drafts]
    samplings = [call.request.sampling for call, _ in drafts]
    k = max(draft.tree.fan_out for _, draft in drafts)
    found = rank(
        logits,
        [positions[owner] for owner in owners],
        [samplings[owner] for owner in owners],
        k,
        ids,
        [sharpness[owner] for owner in owners],
    )
    best, scores = found.ids.int().cpu().numpy(), found.scores.cpu().numpy()
    for number, ((call, draft), end) in enumerate(zip(drafts, np.cumsum(num_rows).tolist(), strict=True)):
        rows, columns = slice(end - num_rows[number], end), slice(draft.tree.fan_out)
        times = len(draft.tree.frontier) // num_rows[number]
        if call.request.head.draws:
            _add_sampled(call, draft, logits[rows], sharpness[number], ids)
        else:
            draft.tree.add_children(best[rows, columns].repeat(times, 0), scores[rows, columns].repeat(times, 0))


def _add_sampled(
    call: EngineCall[DraftRequest], draft: DraftedTree, logits: Tensor, sharpness: float, ids: Tensor | None
) -> None:
    """Add sampled children below a draft's frontier; logits: (r, V), a row per candidate or one for all."""
    tree, sampling, prefix_len = draft.tree, call.request.sampling, call.delta.prefix_len
    found = candidates(logits, [sampling] * len(logits), ids)
    q = dict(zip(tree.frontier, found * (len(tree.frontier) // len(found)), strict=True))
    position, fan_out = prefix_len + tree.depth, tree.fan_out
    rows = [
        sampled_children(each, position, sampling, prefix_len, fan_out, node, sharpness) for node, each in q.items()
    ]
    draft.q |= q
    tree.add_children(*(np.concatenate(arrays) for arrays in zip(*rows, strict=True)))
