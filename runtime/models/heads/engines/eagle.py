"""The engine behind the Triton models `eagle` and `eagle3`: a tree of predicted features, with a KV cache.

Token j ≥ 1 of the context has a KV row, made of the target's feature of position j − 1 and the token's embedding. The
row is in slot j of the sequence, so that a block of slots is identified by the tokens of its rows; slot 0 has no row.
The rows of drafted nodes follow those of the context. The next call overwrites them with rows made of the target's own
features.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor, nn

from orchestrator.core.context import Context
from orchestrator.core.errors import RequestError
from orchestrator.core.messages.drafter import DraftRequest
from orchestrator.core.types import MAX_FEATURE_ROWS, DraftResponse
from runtime.engine.kv.batch import Pass
from runtime.engine.kv.blocks import BlockPool
from runtime.engine.kv.cache import CacheShape, KVCache
from runtime.engine.kv.groups import Visible
from runtime.engine.kv.sequences import CachedSequence, SequenceTable
from runtime.models.attention import paged_tree_attention
from runtime.models.heads.engines.base import HeadEngine
from runtime.models.heads.engines.drafts import (
    DraftInProgress,
    HeadCall,
    TimeBudget,
    frontier_states,
    has_newest_features,
    parent_states,
)
from runtime.models.heads.modules.eagle import Eagle3Head, EagleHead
from runtime.models.heads.modules.layers import head_dim
from runtime.models.native.cache import NativeCache
from runtime.models.native.draft_calls import NativeDraft
from runtime.models.native.drafters import ContinuedDraft, NativeDrafter
from runtime.models.native.heads import NativeHead


@dataclass(eq=False)
class KVRows:
    """The KV rows that a pass computes for one call; implements `runtime.engine.kv.groups.PassSegment`.

    tokens: the token of each row. first: the index of the first row's slot in the sequence; the others follow.
    row_positions: the position of each row. seen: (rows, slots) bool, the slots that each row attends to.
    """

    sequence: CachedSequence
    tokens: list[int]
    first: int
    row_positions: list[int]
    seen: np.ndarray

    @property
    def num_tokens(self) -> int:
        """Number of rows."""
        return len(self.tokens)

    @property
    def num_slots(self) -> int:
        """Number of slots that the rows may attend to."""
        return int(self.seen.shape[1])

    @property
    def num_outputs(self) -> int:
        """Every row's output is read."""
        return self.num_tokens

    def token_ids(self) -> list[int]:
        """Return the token of each row."""
        return self.tokens

    def positions(self) -> list[int]:
        """Return the position of each row."""
        return self.row_positions

    def visible(self) -> Visible:
        """Return the slots that each row attends to; a head has no sliding window."""
        return Visible(np.zeros(self.num_tokens, np.int64), 0, self.seen)


class EagleEngine(HeadEngine):
    """EAGLE-1 (static tree), EAGLE-2 and EAGLE-3 (dynamic tree); arXiv:2401.15077, 2406.16858, 2503.01840.

    Invariant: the context's KV rows are made of the target's own features. Rows whose features are unavailable leave a
    gap, which keeps its positions and to which no row attends.
    """

    def __init__(
        self,
        head: EagleHead | Eagle3Head,
        memory_mb: int,
        block_tokens: int,
        share_prefixes: bool = True,
        native: NativeHead | None = None,
    ) -> None:
        config, weight = head.config, head.get_buffer("embedding")
        super().__init__(head.feature_width, len(weight), weight, head.sharpness, native)
        # Native code keeps the outputs of its rows along with their keys and values.
        width = config.hidden_size if native else 0
        shape = CacheShape(1, config.num_key_value_heads or config.num_attention_heads, head_dim(config), width)
        self._head = head
        self.draft_ids = head.ids
        self.default_choices = head.default_choices
        if native:
            self.cache: KVCache = NativeCache(shape, memory_mb, block_tokens)
        else:
            self.cache = KVCache(shape, memory_mb, block_tokens, weight.dtype, weight.device)
        # Slots without a row are never written, and a NaN in one of them would spoil attention even if masked.
        self.cache.kv.zero_()
        pool = BlockPool(self.cache.num_blocks, block_tokens)
        self._sequences = SequenceTable(pool, config.max_position_embeddings, share_prefixes)

    def cached_len(self, call: HeadCall) -> int:
        """Return the first position whose features the cache lacks; without a sequence, the newest position."""
        return max(call.sequence.num_computed - 1, 0) if call.sequence else call.delta.prefix_len - 1

    def open(self, call: HeadCall) -> str:
        """Bring the sequence up to the call's context; rows whose features are unavailable become a gap."""
        head = call.request.head
        depth = self.max_depth(call)
        if depth < 1:
            raise RequestError(f"the context has reached the head's limit, {self._sequences.max_positions} positions")
        call.sequence = self._sequences.open(call.delta, _num_expanded(call.request, depth), depth)
        call.sequence.last_used_s = time.monotonic()
        if head.features is None or not has_newest_features(call):
            return "the newest features are missing"
        needed = self.cached_len(call)
        if head.features_start > needed and len(head.features) < MAX_FEATURE_ROWS:
            return f"features from {needed} on are missing"
        _skip_rows(call.sequence, head.features_start)
        return ""

    def max_depth(self, call: HeadCall) -> int:
        """Return the request's depth, limited to the positions that the head has left."""
        return min(call.request.max_depth, self._sequences.max_positions - call.delta.prefix_len)

    def begin(self, calls: list[HeadCall]) -> list[DraftInProgress]:
        """Compute the rows of the tokens committed since the last call; the newest row's output is the root's state."""
        parts = [_context_rows(call) for call in calls]
        features = [
            call.request.head.features_since(part.row_positions[0]) for call, part in zip(calls, parts, strict=True)
        ]
        states = self._forward(self._head.fuse(self.on_device(features)), parts)
        drafts = []
        for call, end in zip(calls, np.cumsum([part.num_tokens for part in parts]).tolist(), strict=True):
            prefix_len = call.opened.num_computed = call.delta.prefix_len
            call.opened.publish(prefix_len)
            tree = self.new_tree(call)
            state, slot = states[end - 1], prefix_len - 1
            drafts.append(DraftInProgress(tree, call=call, states={0: state}, slots={0: slot}))
        return drafts

    def draft_natively(self, native: NativeHead, calls: list[HeadCall], budget: TimeBudget) -> list[DraftResponse]:
        """Return the tree of each call; the rows of the tokens committed since the last call are computed first."""
        drafts = []
        for call in calls:
            sequence, first = call.opened, max(call.opened.num_computed, 1)
            tokens = sequence.ids[first : call.delta.prefix_len]
            draft = self.native_draft(call, budget, tokens, first - 1)
            drafts.append(replace(draft, blocks=sequence.blocks, first_slot=first, gap=sequence.missing_rows))
        trees = native.draft(drafts, self.cache)
        for call in calls:
            call.opened.num_computed = call.delta.prefix_len
            call.opened.publish(call.delta.prefix_len)
        return trees

    def continued(self, request: DraftRequest, context: Context, num_ahead: int) -> ContinuedDraft | None:
        """Return how native code can continue; slots for the tokens ahead are reserved as far as the pool has them."""
        sequence = self._sequences.find(request.delta.sequence_id, context)
        if sequence is None or sequence.num_computed != len(context):
            return None
        sequence.reserve_up_to(len(context) + num_ahead + _num_expanded(request, request.max_depth))
        draft = self.draft_after(request, context)
        return ContinuedDraft(replace(draft, blocks=sequence.blocks, gap=sequence.missing_rows), len(context), sequence)

    def burst_drafter(self, drafts: Sequence[NativeDraft]) -> NativeDrafter:
        """Return what native code needs to call the head in a burst."""
        assert self.native is not None
        return self.native.burst_drafter(drafts, self.cache, self._sequences.max_positions)

    def logits(self, drafts: list[DraftInProgress]) -> Tensor:
        """Return the logits of the children of all frontiers, (n, V or V_d)."""
        return self._head.logits(frontier_states(drafts))

    def next_states(self, drafts: list[DraftInProgress]) -> Tensor:
        """Compute the rows of the frontiers' candidates; return their outputs, (n, d)."""
        return self._forward(parent_states(drafts), [_node_rows(draft) for draft in drafts])

    def _forward(self, state: Tensor, parts: list[KVRows]) -> Tensor:
        """Run the layer over all rows; state: (N, d) → (N, d)."""
        batch = Pass(parts, self._device, self._dtype)

        def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            scaling = query.shape[-1] ** -0.5
            options = {"scaling": scaling, "batch": batch, "cache": self.cache}
            return paged_tree_attention(module, query, key, value, None, **options)[0]

        return self._head.forward(state[None], batch.ids, batch.positions, attend)[0]


def _num_expanded(request: DraftRequest, depth: int) -> int:
    """Return how many nodes can be expanded at most: `width` per level of a dynamic tree, all nodes of a static one."""
    return request.head.width * (depth - 1) if request.head.width else request.max_nodes


def _skip_rows(sequence: CachedSequence, features_start: int) -> None:
    """Mark the rows before `features_start` as missing for good; the gap includes an older one and the rows between."""
    first = max(sequence.num_computed, 1)
    if features_start + 1 > first:
        start = sequence.missing_rows.start if sequence.missing_rows else first
        sequence.missing_rows = range(start, features_start + 1)
        sequence.num_computed = features_start + 1


def _seen_context(call: HeadCall) -> np.ndarray:
    """Return which slots of the context hold a row, (prefix_len,) bool."""
    seen, missing = np.ones(call.delta.prefix_len, np.bool_), call.opened.missing_rows
    seen[0] = seen[missing.start : missing.stop] = False
    return seen


def _context_rows(call: HeadCall) -> KVRows:
    """Return the rows of the committed context that the cache lacks."""
    sequence, last = call.opened, call.delta.prefix_len
    first = max(sequence.num_computed, 1)
    seen = np.tri(last - first, last, first, dtype=np.bool_) & _seen_context(call)
    return KVRows(sequence, sequence.ids[first:last], first, [*range(first - 1, last - 1)], seen)


def _node_rows(draft: DraftInProgress) -> KVRows:
    """Return the rows of the frontier's candidates, and give each its slot."""
    tree, prefix_len, num_expanded = draft.tree, draft.call.delta.prefix_len, len(draft.slots)
    first = prefix_len - 1 + num_expanded
    draft.slots |= {node: first + i for i, node in enumerate(tree.frontier)}
    seen = np.zeros((len(tree.frontier), first + len(tree.frontier)), np.bool_)
    seen[:, :prefix_len] = _seen_context(draft.call)
    for row, node in enumerate(tree.frontier):
        seen[row, [draft.slots[ancestor] for ancestor in tree.path(node)]] = True
    positions = [prefix_len - 2 + tree.depth] * len(tree.frontier)
    return KVRows(draft.call.opened, [tree.tokens[node] for node in tree.frontier], first, positions, seen)
