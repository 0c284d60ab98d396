"""The engine behind the Triton model `redrafter`: a beam search over a recurrent head, packed into a prefix tree."""

from __future__ import annotations

import torch
from torch import Tensor

from orchestrator.core.tree import TokenTree
from runtime.heads.engines.base import Allowance, HeadCall, HeadEngine, grow, growth_of
from runtime.heads.engines.growth import Growth
from runtime.heads.modules.redrafter import RecurrentHead


class RecurrentEngine(HeadEngine):
    """ReDrafter (arXiv:2403.09919, section 3); it keeps nothing between calls."""

    def __init__(self, head: RecurrentHead) -> None:
        embedding = head.get_buffer("embedding")
        super().__init__(embedding.shape[1], len(embedding), embedding.device, embedding.dtype)
        self._head = head

    def draft(self, jobs: list[HeadCall]) -> list[TokenTree]:
        """Return each job's beams as a tree."""
        allowance = Allowance()
        growths = [growth_of(job, job.request.max_depth, beams=True) for job in jobs]
        newest = torch.cat([self.features_of(job, job.delta.prefix_len - 2) for job in jobs])
        roots = torch.tensor([int(job.delta.context_ids[-1]) for job in jobs], device=newest.device)
        states = self._head.advance(torch.zeros_like(newest), roots)
        kept = [{0: state} for state in states]
        live = list(range(len(jobs)))
        while live:
            self._level([jobs[i] for i in live], [growths[i] for i in live], newest[live], [kept[i] for i in live])
            allowance.note_level()
            live = [i for i in live if growths[i].frontier and allowance.allows(jobs[i])]
            if live:
                self._advance([growths[i] for i in live], [kept[i] for i in live])
        return [growth.tree() for growth in growths]

    def _level(
        self, jobs: list[HeadCall], growths: list[Growth], newest: Tensor, kept: list[dict[int, Tensor]]
    ) -> None:
        """Rank the children of every frontier; newest: (n, d), the target's state that conditions each job's draft."""
        states = torch.stack([own[node] for own, growth in zip(kept, growths, strict=True) for node in growth.frontier])
        counts = torch.tensor([len(growth.frontier) for growth in growths], device=newest.device)
        grow(jobs, growths, self._head.logits(newest.repeat_interleave(counts, dim=0), states), None)

    def _advance(self, growths: list[Growth], kept: list[dict[int, Tensor]]) -> None:
        """Note the recurrent state behind every node of the new frontiers."""
        nodes = [(own, growth, node) for own, growth in zip(kept, growths, strict=True) for node in growth.frontier]
        before = torch.stack([own[growth.parent(node)] for own, growth, node in nodes])
        tokens = torch.tensor([growth.token(node) for _, growth, node in nodes], device=before.device)
        for (own, _, node), state in zip(nodes, self._head.advance(before, tokens), strict=True):
            own[node] = state
