"""The KV cache of the native forward pass: keys in tiles of sixteen, which are scored together."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from native.failures import check
from native.library import load
from orchestrator.core.errors import EngineError
from runtime.engine.kv.cache import CacheShape, KVCache

#: Slots of a tile of keys (pass.h, kKeyTile).
KEY_TILE = 16


class NativeCache(KVCache):
    """`kv` holds values by slot, as in `KVCache`, and keys in tiles of 16 slots, each (head_dim, 16)."""

    def __init__(self, shape: CacheShape, memory_mb: int, block_tokens: int) -> None:
        super().__init__(shape, memory_mb, block_tokens, torch.float32, torch.device("cpu"))
        missing = -self.kv.shape[3] % KEY_TILE
        if missing:  # only with small blocks; the block pool does not use the added slots
            layers, kinds, heads, slots, size = self.kv.shape
            self.kv = torch.empty((layers, kinds, heads, slots + missing, size))
        self._library = load()
        self._library.native_advise(self.kv.data_ptr(), self.kv.nbytes)

    def move(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy slots to other slots; all are read before any is written."""
        count = len(sources)
        if count != len(destinations) or not all(0 <= slot < len(self.features) for slot in (*sources, *destinations)):
            raise EngineError("a slot to move is outside the cache")
        layers, _, heads, slots, size = self.kv.shape
        numbers = ctypes.c_int32 * count
        sizes = layers * heads, heads, slots, size
        wrong = self._library.native_move(self.kv.data_ptr(), *sizes, numbers(*sources), numbers(*destinations), count)
        check(wrong, "moving slots")
        if self.features.shape[1]:
            self.features[list(destinations)] = self.features[list(sources)]
