"""The engine behind the Triton models `eagle` and `eagle3`: features drawn forward over a tree, cached by content."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor, nn

from orchestrator.core.errors import RequestError
from orchestrator.core.tree import TokenTree
from orchestrator.wire.head_input import MAX_FEATURE_ROWS
from runtime.heads.engines.base import Allowance, HeadCall, HeadEngine, grow, growth_of, newest_is_there
from runtime.heads.engines.kv_rows import Draft, KVRows, context_entries, node_entries
from runtime.heads.modules.eagle import Extrapolator
from runtime.heads.modules.layers import head_dim
from runtime.kv.batch import Pass
from runtime.kv.blocks import BlockPool
from runtime.kv.cache import CacheShape, KVCache
from runtime.kv.sequences import CachedSequence, SequenceTable
from runtime.model.attention import paged_tree_attention


class EagleEngine(HeadEngine):
    """EAGLE-1 (static tree), EAGLE-2 and EAGLE-3 (dynamic tree); arXiv:2401.15077, 2406.16858, 2503.01840.

    Invariant: an entry of the context is made of true features; a hole, where features were not to be had, keeps its
    positions and is seen by nobody.
    """

    def __init__(self, head: Extrapolator, memory_mb: int, block_tokens: int, share: bool = True) -> None:
        config, weight = head.config, head.get_buffer("embedding")
        super().__init__(head.feature_width, len(weight), weight.device, weight.dtype)
        shape = CacheShape(1, config.num_key_value_heads or config.num_attention_heads, head_dim(config))
        self._head = head
        self._ids = head.ids
        self._own_choices = head.own_choices
        self._cache = KVCache(shape, memory_mb, block_tokens, weight.dtype, weight.device)
        # Slots without an entry are never written, and attention takes no NaN, not even masked.
        self._cache.kv.zero_()
        pool = BlockPool(self._cache.num_blocks, block_tokens)
        self._sequences = SequenceTable(pool, config.max_position_embeddings, share)

    def cached_len(self, job: HeadCall) -> int:
        """Return the first position whose features its sequence lacks; without one, only the newest is of use."""
        return max(job.sequence.num_computed - 1, 0) if job.sequence else job.delta.prefix_len - 1

    def open(self, job: HeadCall) -> str:
        """Sync the sequence, and note the hole that features which nobody has leave in it."""
        head = job.request.head
        depth = self._depth(job)
        if depth < 1:
            raise RequestError(f"the context has reached the head's limit, {self._sequences.max_positions} positions")
        # At most so many nodes are expanded: of a dynamic tree a width a level, of a static one all of its nodes.
        num_expanded = head.width * (depth - 1) if head.width else job.request.max_nodes
        job.sequence = self._sequences.open(job.delta, num_expanded, depth)
        job.sequence.last_used_s = time.monotonic()
        if head.features is None or not newest_is_there(job):
            return "the newest features are missing"
        lacks = self.cached_len(job)
        if head.features_start > lacks and len(head.features) < MAX_FEATURE_ROWS:
            return f"features from {lacks} on are missing"
        _skip(job.sequence, head.features_start)
        return ""

    def _depth(self, job: HeadCall) -> int:
        return min(job.request.max_depth, self._sequences.max_positions - job.delta.prefix_len)

    def draft(self, jobs: list[HeadCall]) -> list[TokenTree]:
        """Return each job's tree."""
        allowance = Allowance()
        drafts = [Draft(job, growth_of(job, self._depth(job), self._own_choices)) for job in jobs]
        self._extend(drafts)
        allowance.begin_levels()
        live = drafts
        while live:
            states = torch.stack([draft.state[node] for draft in live for node in draft.growth.frontier])
            grow([d.job for d in live], [d.growth for d in live], self._head.logits(states), self._ids)
            allowance.note_level()
            live = [draft for draft in live if draft.growth.frontier and allowance.allows(draft.job)]
            if live:
                self._expand(live)
        return [draft.growth.tree() for draft in drafts]

    def _extend(self, drafts: list[Draft]) -> None:
        """Make the entries of what was committed since the last call; the newest one is the root's."""
        parts = [context_entries(draft) for draft in drafts]
        features = [self.features_of(draft.job, part.place[0]) for draft, part in zip(drafts, parts, strict=True)]
        states = self._forward(self._head.fuse(torch.cat(features)), parts)
        last = np.cumsum([part.num_tokens for part in parts]) - 1
        for draft, row in zip(drafts, last.tolist(), strict=True):
            sequence = draft.job.opened
            draft.state[0], draft.slot[0] = states[row], draft.job.delta.prefix_len - 1
            sequence.num_computed = draft.job.delta.prefix_len
            sequence.publish(sequence.num_computed)

    def _expand(self, drafts: list[Draft]) -> None:
        """Make the entries of the frontiers' nodes."""
        before = [draft.state[draft.growth.parent(n)] for draft in drafts for n in draft.growth.frontier]
        parts = [node_entries(draft) for draft in drafts]
        states = iter(self._forward(torch.stack(before), parts))
        for draft in drafts:
            for node in draft.growth.frontier:
                draft.state[node] = next(states)

    def _forward(self, state: Tensor, parts: list[KVRows]) -> Tensor:
        """Run the layer over all entries; state: (N, d) → (N, d)."""
        batch = Pass(parts, self._device, self._dtype)

        def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            scaling = query.shape[-1] ** -0.5
            options = {"scaling": scaling, "batch": batch, "cache": self._cache}
            return paged_tree_attention(module, query, key, value, None, **options)[0]

        return self._head.forward(state[None], batch.ids, batch.positions, attend)[0]


def _skip(sequence: CachedSequence, features_start: int) -> None:
    """Note the entries before `features_start` that can never be made; several holes become one."""
    first = max(sequence.num_computed, 1)
    if features_start + 1 > first:
        sequence.missing_rows = range(
            sequence.missing_rows.start if sequence.missing_rows else first, features_start + 1
        )
        sequence.num_computed = features_start + 1
