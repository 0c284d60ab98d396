"""Blocks of KV slots, found by content: which are held, cached, free or to evict; knows nothing of tensors."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.core.errors import Unavailable


@dataclass(frozen=True)
class BlockKey:
    """Identifies a block's content. digest: of all tokens up to the block's end. ids: its own tokens, int32 bytes."""

    digest: bytes
    ids: bytes

    @classmethod
    def root(cls, cache_salt: str) -> BlockKey:
        """Return the parent of a sequence's first block; sequences with different salts share nothing."""
        return cls(_digest(b"salt:" + cache_salt.encode()), b"")

    def child(self, ids: Sequence[int]) -> BlockKey:
        """Return the key of the block that holds `ids` after this one."""
        content = np.array(ids, np.int32).tobytes()
        return BlockKey(_digest(self.digest + content), content)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


class BlockPool:
    """A fixed number of blocks; each is free, held (by one or more sequences), or cached (kept until evicted).

    Invariant: num_free + num_cached + num_held == num_blocks; a held block is never evicted.
    """

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._free = np.ones(num_blocks, np.bool_)
        self.num_free = num_blocks  # blocks without content
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._holders = [0] * num_blocks
        self._keys: dict[int, BlockKey] = {}
        self._blocks: dict[bytes, int] = {}

    @property
    def num_cached(self) -> int:
        """Blocks that no sequence holds and whose content can be found."""
        return len(self._cached)

    @property
    def num_held(self) -> int:
        """Blocks that a sequence holds."""
        return self.num_blocks - self.num_free - self.num_cached

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now."""
        return self.num_free + self.num_cached

    def find(self, key: BlockKey) -> int | None:
        """Hold and return the block with this content, or return None; the ids are compared in case digests collide."""
        block = self._blocks.get(key.digest)
        if block is None or self._keys[block].ids != key.ids:
            return None
        self._hold(block)
        return block

    def allocate(self, count: int, after: int | None) -> list[int]:
        """Hold `count` blocks without content: if possible consecutive ones, after block `after` if it is given.

        Attention in torch reads consecutive blocks without a copy. In a pool that has been full they are scattered:
        keeping what was used last is worth more (docs/architecture.md, The engine).
        Raises Unavailable when too few blocks are free or cached.
        """
        available = self.num_available
        if count > available:
            raise Unavailable(
                f"KV pool full: {count} blocks needed, {available} of {self.num_blocks} available "
                "(kv_memory_mb in the deployment file)"
            )
        blocks: list[int] = []
        for _ in range(count):
            after = self._next_block(after)
            blocks.append(after)
            self._hold(after)
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Give a sequence's blocks back, the last one first, so that its end is evicted before its start."""
        for block in reversed(list(blocks)):
            self._holders[block] -= 1
            if self._holders[block] == 0 and block in self._keys:
                self._cached[block] = None
            elif self._holders[block] == 0:
                self._mark_free(block, True)

    def publish(self, block: int, key: BlockKey) -> None:
        """Make a full block findable by its content; a second block with the same content stays private."""
        if key.digest not in self._blocks:
            self._keys[block] = key
            self._blocks[key.digest] = block

    def _hold(self, block: int) -> None:
        self._holders[block] += 1
        self._mark_free(block, False)
        self._cached.pop(block, None)

    def _mark_free(self, block: int, free: bool) -> None:
        self.num_free += int(free) - int(self._free[block])
        self._free[block] = free

    def _next_block(self, after: int | None) -> int:
        if after is not None and after + 1 < self.num_blocks and self._free[after + 1]:
            return after + 1
        if not self.num_free:
            self._evict()
        return self._middle_of_longest_gap()

    def _evict(self) -> None:
        """Free an eighth of the pool, the least recently used blocks, so that many consecutive ones become free."""
        for _ in range(min(max(self.num_blocks // 8, 1), len(self._cached))):
            block, _ = self._cached.popitem(last=False)
            del self._blocks[self._keys.pop(block).digest]
            self._mark_free(block, True)

    def _middle_of_longest_gap(self) -> int:
        """Return the middle one of the most free blocks in a row, so that the sequence before them can grow, too.

        At the beginning of the pool, where no sequence is before them, return the first one.
        """
        free = np.flatnonzero(self._free)
        starts = np.flatnonzero(np.diff(free, prepend=-2) != 1)
        lengths = np.diff(starts, append=len(free))
        longest = int(lengths.argmax())
        start = int(free[starts[longest]])
        return start if start == 0 else start + int(lengths[longest]) // 2
