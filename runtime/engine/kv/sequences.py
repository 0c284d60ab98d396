"""The sequences that an engine keeps between steps: their tokens, how many are computed, and in which blocks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from orchestrator.core.context import Context
from orchestrator.core.errors import EngineError, RequestError, Unavailable, UnknownSequence
from orchestrator.core.messages.context import Delta
from runtime.engine.kv.blocks import BlockKey, BlockPool
from runtime.engine.sampling.logits_processors import LogitsProcessors

#: A sequence without a call for this long is considered gone: its client may have died without releasing it.
IDLE_S = 2.0


class CachedSequence:
    """One request's tokens in the KV cache.

    number: sequences are numbered in order of arrival. num_cached: tokens whose blocks were found in the pool when the
    sequence began. missing_rows: indices below num_computed whose KV rows were not computed.
    Invariant: the other KV rows of ids[:num_computed] are in slots 0 … num_computed − 1 of `blocks`; full blocks before
    the first missing row are published under their content.
    """

    def __init__(self, sequence_id: int, pool: BlockPool, cache_salt: str, number: int = 0) -> None:
        self.sequence_id, self.number = sequence_id, number
        self.context = Context([])
        self.num_computed = 0
        self.num_cached = 0
        self.missing_rows = range(0)
        self.blocks: list[int] = []
        self.last_used_s = 0.0
        self.logits_processors: LogitsProcessors | None = None
        self._pool = pool
        self._keys = [BlockKey.root(cache_salt)]

    @property
    def ids(self) -> list[int]:
        """Ids of the tokens; the computed ones come first."""
        return self.context.ids

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self._pool.block_tokens

    def sync(self, delta: Delta) -> None:
        """Make `ids` the committed context, and forget what was computed beyond the common prefix.

        Raises UnknownSequence when the tokens before delta.context_start differ from the sender's.
        """
        delta.check_follows(self.context)
        start, new = delta.context_start, delta.context_ids.tolist()
        pairs = enumerate(zip(self.ids[start:], new, strict=False))
        common = next((start + i for i, (a, b) in pairs if a != b), min(len(self.ids), start + len(new)))
        self.context.truncate(common)
        self.context.commit(new[common - start :])
        self._forget_beyond(min(common, len(self.context) - 1))

    def _forget_beyond(self, length: int) -> None:
        """Forget the rows beyond `length`; published blocks never change, so a partly forgotten one is given back."""
        self.num_computed = min(self.num_computed, length)
        self.missing_rows = range(self.missing_rows.start, min(self.missing_rows.stop, length))
        num_kept = self.num_computed // self._pool.block_tokens
        if num_kept < len(self._keys) - 1:
            self._pool.release(self.blocks[num_kept:])
            del self.blocks[num_kept:], self._keys[num_kept + 1 :]
            self.num_computed = num_kept * self._pool.block_tokens

    def extend(self, num_known: int, tokens: Sequence[int], drafts: Sequence[int], num_computed: int) -> None:
        """Note what native code has computed: the tokens committed after the first num_known ones, and drafts."""
        self.context.truncate(num_known)
        self.context.commit([*tokens, *drafts])
        self.num_computed = num_computed
        self.last_used_s = time.monotonic()
        self.publish(num_known + len(tokens))

    def adopt(self) -> None:
        """Hold the published blocks that match the first tokens; only for a sequence that holds no blocks."""
        size = self._pool.block_tokens
        for start in range(0, len(self.context) - size, size):
            key = self._keys[-1].child(self.ids[start : start + size])
            block = self._pool.find(key)
            if block is None:
                break
            self._keys.append(key)
            self.blocks.append(block)
        self.num_computed = len(self.blocks) * size

    def reserve(self, num_slots: int) -> None:
        """Hold blocks for `num_slots` slots in total; raises Unavailable when the pool is full."""
        if missing := self.num_missing_blocks(num_slots):
            last = self.blocks[-1] if self.blocks else None
            self.blocks += self._pool.allocate(missing, last)

    def reserve_up_to(self, num_slots: int) -> None:
        """Hold blocks for `num_slots` slots if the pool has them."""
        with suppress(Unavailable):
            self.reserve(num_slots)

    def publish(self, num_committed: int) -> None:
        """Publish the blocks that are full of computed, committed tokens, so that other sequences can find them."""
        size = self._pool.block_tokens
        end = min(self.num_computed, num_committed, self.missing_rows.start if self.missing_rows else num_committed)
        for index in range(len(self._keys) - 1, end // size):
            key = self._keys[-1].child(self.ids[index * size : (index + 1) * size])
            self._keys.append(key)
            self._pool.publish(self.blocks[index], key)

    def preempt(self) -> None:
        """Publish the full blocks, give all back to the pool and forget what was computed; the tokens stay."""
        self.publish(len(self.ids))
        self.release()
        self.num_computed, self.missing_rows = 0, range(0)
        del self._keys[1:]

    def num_missing_blocks(self, num_slots: int) -> int:
        """Return how many more blocks the sequence needs for `num_slots` slots in total."""
        return max(-(-num_slots // self._pool.block_tokens) - len(self.blocks), 0)

    def release(self) -> None:
        """Give all blocks back to the pool."""
        self._pool.release(self.blocks)
        self.blocks = []

    def is_contiguous(self) -> bool:
        """True when the blocks are consecutive in memory."""
        first = self.blocks[0]
        return self.blocks == list(range(first, first + len(self.blocks)))

    def slot(self, index: int) -> int:
        """Return the cache slot of the index-th token."""
        size = self._pool.block_tokens
        return self.blocks[index // size] * size + index % size


class SequenceTable:
    """The live sequences of one engine; one without a step for IDLE_S is forgotten.

    share: a new sequence may begin with blocks that other sequences have computed. num_preempted: how often a sequence
    has given up its blocks for an older one.
    """

    def __init__(self, pool: BlockPool, max_positions: int, share: bool = True) -> None:
        self.pool = pool
        self.max_positions = max_positions
        self.share = share
        self._live: dict[int, CachedSequence] = {}
        self._num_begun = 0
        self.num_preempted = 0

    def __len__(self) -> int:
        return len(self._live)

    def open(self, delta: Delta, num_drafts: int, max_depth: int) -> CachedSequence:
        """Return the call's sequence, with its context in sync and slots reserved for its drafts.

        Raises UnknownSequence, RequestError (context too long), Unavailable (pool full).
        """
        sequence = self.enter(delta, num_drafts, max_depth)
        try:
            sequence.reserve(delta.prefix_len + num_drafts)
        except Exception:
            self.drop(sequence.sequence_id)
            raise
        return sequence

    def enter(self, delta: Delta, num_drafts: int, max_depth: int) -> CachedSequence:
        """Return the call's sequence with its context in sync; one without blocks adopts those found by content.

        Raises UnknownSequence, RequestError (context too long).
        """
        self._check_length(delta, num_drafts, max_depth)
        sequence = self._live.get(delta.sequence_id)
        is_new = sequence is None
        if sequence is None:
            if delta.context_start:
                raise UnknownSequence(f"sequence {delta.sequence_id}")
            self._num_begun += 1
            sequence = CachedSequence(delta.sequence_id, self.pool, delta.cache_salt, self._num_begun)
        sequence.sync(delta)
        if self.share and not sequence.blocks:
            sequence.adopt()
        if is_new:
            sequence.num_cached = sequence.num_computed
            self._live[delta.sequence_id] = sequence
        return sequence

    def find(self, sequence_id: int, context: Context) -> CachedSequence | None:
        """Return a sequence if it is known and its tokens begin with the context."""
        sequence, length = self._live.get(sequence_id), len(context)
        if sequence is None or len(sequence.ids) < length:
            return None
        return sequence if sequence.context.rolling_hash(length) == context.rolling_hash(length) else None

    def number_of(self, sequence_id: int) -> int:
        """Return a sequence's number; for an unknown sequence, the next number."""
        sequence = self._live.get(sequence_id)
        return sequence.number if sequence else self._num_begun + 1

    def blocks_of(self, sequence_id: int) -> list[int]:
        """Return the blocks that a sequence holds; empty if it is unknown."""
        sequence = self._live.get(sequence_id)
        return sequence.blocks if sequence else []

    def holders(self) -> list[CachedSequence]:
        """Return the sequences that hold blocks, the oldest first."""
        return sorted((s for s in self._live.values() if s.blocks), key=lambda s: s.number)

    def _check_length(self, delta: Delta, num_drafts: int, max_depth: int) -> None:
        if not len(delta.context_ids):
            raise EngineError("context_ids is empty; it must end with the root")
        length = delta.prefix_len + max_depth
        if length > self.max_positions:
            raise RequestError(
                f"{length} tokens of context and draft exceed the model's {self.max_positions} positions"
            )
        needed = -(-(delta.prefix_len + num_drafts) // self.pool.block_tokens)
        if needed > self.pool.num_blocks:
            raise RequestError(
                f"context of {delta.prefix_len} tokens needs {needed} KV blocks, the pool has "
                f"{self.pool.num_blocks} (kv_memory_mb in the deployment file)"
            )

    def check_capacity(self, num_tokens: int) -> None:
        """Raise RequestError for a sequence that the whole pool could not hold to its end."""
        size, count = self.pool.block_tokens, self.pool.num_blocks
        if num_tokens > size * count:
            raise RequestError(
                f"prompt, max_tokens and drafts need KV blocks for {num_tokens} tokens, the pool holds {size * count} "
                "(kv_memory_mb in the deployment file)"
            )

    def drop(self, sequence_id: int) -> None:
        """Forget a sequence; its published blocks can still be found by content."""
        if sequence := self._live.pop(sequence_id, None):
            sequence.release()

    def drop_idle(self, now_s: float, busy: set[int]) -> None:
        """Forget the sequences that have been idle too long; busy: ids of those with a call waiting."""
        for sequence in list(self._live.values()):
            if sequence.sequence_id not in busy and now_s - sequence.last_used_s > IDLE_S:
                self.drop(sequence.sequence_id)
