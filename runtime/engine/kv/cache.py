"""The memory of the blocks: keys, values and features of every slot; knows nothing of requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from orchestrator.core.errors import ConfigError
from runtime.engine.staging import stage


@dataclass(frozen=True)
class CacheShape:
    """The size of one token in the cache. feature_width: width of the hidden states kept for drafting heads."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    feature_width: int = 0

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one slot."""
        return (2 * self.num_layers * self.num_kv_heads * self.head_dim + self.feature_width) * dtype.itemsize


def num_blocks_in(memory_mb: int, shape: CacheShape, block_tokens: int, dtype: torch.dtype) -> int:
    """Return how many blocks fit into the memory; raises ConfigError if fewer than 2 do."""
    block_bytes = block_tokens * shape.token_bytes(dtype)
    num_blocks = (memory_mb << 20) // block_bytes
    if num_blocks < 2:
        raise ConfigError(
            f"kv_memory_mb = {memory_mb} holds {num_blocks} KV blocks of {block_bytes} bytes, "
            "at least 2 are needed (key kv_memory_mb in the deployment file)"
        )
    return num_blocks


class KVCache:
    """Keys and values in `kv`, (layers, 2, kv_heads, slots, head_dim); hidden states in `features`, (slots, width).

    Heads come before slots, so that attention reads each head's rows contiguously (a third faster at one token).
    """

    def __init__(
        self, shape: CacheShape, memory_mb: int, block_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_tokens = block_tokens
        self.num_blocks = num_blocks_in(memory_mb, shape, block_tokens, dtype)
        slots = self.num_blocks * block_tokens
        size = shape.num_layers, 2, shape.num_kv_heads, slots, shape.head_dim
        try:
            self.kv = torch.empty(size, dtype=dtype, device=device)
            self.features = torch.empty((slots, shape.feature_width), dtype=dtype, device=device)
        except RuntimeError:  # torch.OutOfMemoryError, which this is on a GPU, is one too
            raise ConfigError(
                f"kv_memory_mb = {memory_mb} is more memory than {device} has free; take less "
                "(key kv_memory_mb in the deployment file)"
            ) from None

    @torch.inference_mode()
    def move(self, sources: list[int], destinations: list[int]) -> None:
        """Copy slots to other slots; all sources are read before any destination is written."""
        source, destination = stage([np.array(sources), np.array(destinations)], self.kv.device)
        self.kv[:, :, :, destination] = self.kv[:, :, :, source]
        if self.features.shape[1]:
            self.features[destination] = self.features[source]
