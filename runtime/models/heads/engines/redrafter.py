"""The engine behind the Triton model `redrafter`: a beam search over a recurrent head, packed into a prefix tree."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.engine.staging import staged
from runtime.models.heads.engines.base import HeadEngine
from runtime.models.heads.engines.drafts import DraftInProgress, HeadCall, frontier_states, parent_states
from runtime.models.heads.modules.redrafter import RedrafterHead
from runtime.models.native.heads import NativeHead


class RedrafterEngine(HeadEngine):
    """ReDrafter (arXiv:2403.09919, section 3); it keeps nothing between calls.

    A candidate's state is a pair (2, d): the target's newest state, the same for the whole tree, and the recurrent
    state after the candidate.
    """

    beam_search = True

    def __init__(self, head: RedrafterHead, native: NativeHead | None = None) -> None:
        embedding = head.get_buffer("embedding")
        super().__init__(embedding.shape[1], len(embedding), embedding, head.sharpness, native)
        self._head = head

    def begin(self, calls: list[HeadCall]) -> list[DraftInProgress]:
        """Return each call's tree with the state after its root."""
        newest = self.newest_features(calls)
        roots = staged([int(call.delta.context_ids[-1]) for call in calls], newest.device)
        pairs = torch.stack([newest, self._head.advance(torch.zeros_like(newest), roots)], dim=1)
        trees = [self.new_tree(call) for call in calls]
        return [
            DraftInProgress(tree, call=call, states={0: pair})
            for call, tree, pair in zip(calls, trees, pairs, strict=True)
        ]

    def logits(self, drafts: list[DraftInProgress]) -> Tensor:
        """Return the logits of the children of all frontiers, (n, V)."""
        return self._head.logits(*frontier_states(drafts).unbind(1))

    def next_states(self, drafts: list[DraftInProgress]) -> Tensor:
        """Return the pairs of all frontiers' candidates, (n, 2, d)."""
        newest, before = parent_states(drafts).unbind(1)
        ids = [draft.tree.tokens[node] for draft in drafts for node in draft.tree.frontier]
        after = self._head.advance(before, staged(ids, before.device))
        return torch.stack([newest, after], dim=1)
