"""The KV blocks of a compiled engine: memory of ours, in the layout that its attention reads."""

from __future__ import annotations

import torch

from runtime.cache import KVCache, num_blocks_in
from runtime.trtllm_trees.geometry import Geometry


class PoolCache(KVCache):
    """Keys and values in `kv`, (blocks, layers, 2, kv_heads, block_tokens, head_dim); no hidden states.

    Law: the engine finds K of block b in layer 0 at offset 2 · layers · b, V at the next one, counted in blocks of one
    layer's keys (BlocksManager of tensorrt_llm/runtime/kv_cache_manager.py); it adds the layer by itself.
    """

    def __init__(self, geometry: Geometry, memory_mb: int, device: torch.device) -> None:
        shape, size = geometry.shape, geometry.tokens_per_block
        self.block_tokens = size
        self.num_blocks = num_blocks_in(memory_mb, shape, size, geometry.kv_dtype)
        self.kv = torch.zeros(
            (self.num_blocks, shape.num_layers, 2, shape.num_kv_heads, size, shape.head_dim),
            dtype=geometry.kv_dtype,
            device=device,
        )
        self.features = torch.empty((self.num_blocks * size, 0), device=device)

    @torch.inference_mode()
    def move(self, sources: list[int], destinations: list[int]) -> None:
        """Copy slots to other slots, all read before any is written."""
        source = torch.tensor(sources, device=self.kv.device)
        destination = torch.tensor(destinations, device=self.kv.device)
        size = self.block_tokens
        moved = self.kv[source // size, :, :, :, source % size]
        self.kv[destination // size, :, :, :, destination % size] = moved
