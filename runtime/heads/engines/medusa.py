"""The engine behind the Triton model `medusa`: K guesses from one state, crossed into a tree of given shape."""

from __future__ import annotations

import numpy as np
import torch

from orchestrator.core.tree import TokenTree
from runtime.heads.engines.base import HeadCall, HeadEngine, growth_of, ranked_children
from runtime.heads.modules.medusa import MedusaHeads


class MedusaEngine(HeadEngine):
    """Medusa (arXiv:2401.10774, section 2.1); it keeps nothing between calls.

    Invariant: what stands at depth k is head k's guess, whatever stands above it.
    """

    def __init__(self, heads: MedusaHeads) -> None:
        weight = next(iter(heads.parameters()))
        super().__init__(weight.shape[1], heads.vocab_size, weight.device, weight.dtype)
        self._heads = heads
        self._own_choices = heads.own_choices

    def draft(self, jobs: list[HeadCall]) -> list[TokenTree]:
        """Return each job's tree; its levels beyond the last head stay empty."""
        newest = torch.cat([self.features_of(job, job.delta.prefix_len - 2) for job in jobs])
        logits = self._heads(newest)
        growths = [growth_of(job, min(job.request.max_depth, len(self._heads)), self._own_choices) for job in jobs]
        for k in range(len(self._heads)):
            live = [i for i, growth in enumerate(growths) if growth.frontier]
            if not live:
                break
            owners = [(jobs[i], k) for i in live]
            ids, scores = ranked_children(owners, [growths[i] for i in live], logits[live, k])
            for i, row, row_scores in zip(live, ids, scores, strict=True):
                times, width = len(growths[i].frontier), growths[i].fan_out
                growths[i].take(np.repeat(row[None, :width], times, 0), np.repeat(row_scores[None, :width], times, 0))
        return [growth.tree() for growth in growths]
