"""The engine behind the Triton model `medusa`: K guesses from one state, combined into a static tree."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.models.heads.engines.base import HeadEngine
from runtime.models.heads.engines.drafts import DraftInProgress, HeadCall
from runtime.models.heads.modules.medusa import MedusaHeads
from runtime.models.native.heads import NativeHead


class MedusaEngine(HeadEngine):
    """Medusa (arXiv:2401.10774, section 2.1); it keeps nothing between calls.

    Invariant: the tokens at depth k + 1 are head k's guesses (k ≥ 0), whatever their ancestors are.
    """

    def __init__(self, heads: MedusaHeads, native: NativeHead | None = None) -> None:
        weight = next(iter(heads.parameters()))
        super().__init__(weight.shape[1], heads.vocab_size, weight, heads.sharpness, native)
        self._heads = heads
        self.default_choices = heads.default_choices

    def begin(self, calls: list[HeadCall]) -> list[DraftInProgress]:
        """Return empty trees; the root's state is the target's newest."""
        trees = [self.new_tree(call) for call in calls]
        states = self.newest_features(calls)
        return [
            DraftInProgress(tree, call=call, states={0: state})
            for call, tree, state in zip(calls, trees, states, strict=True)
        ]

    def max_depth(self, call: HeadCall) -> int:
        """Return the request's depth, limited to the number of heads."""
        return min(call.request.max_depth, len(self._heads))

    def num_logit_rows(self, draft: DraftInProgress) -> int:
        """Return 1: all nodes of a level have the same children."""
        return 1

    def logits(self, drafts: list[DraftInProgress]) -> Tensor:
        """Return the logits of this level's head, (drafts, V); all drafts are at the same depth."""
        logits: Tensor = self._heads[drafts[0].tree.depth](torch.stack([draft.states[0] for draft in drafts]))
        return logits
