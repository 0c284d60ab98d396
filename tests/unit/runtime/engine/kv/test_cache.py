"""The memory of the KV cache: what does not fit is refused with the key that asks for it."""

from __future__ import annotations

import pytest
import torch

from orchestrator.core.errors import ConfigError
from runtime.engine.kv.cache import CacheShape, KVCache

SHAPE = CacheShape(num_layers=2, num_kv_heads=2, head_dim=8, feature_width=0)


@pytest.mark.parametrize(("memory_mb", "words"), [(0, "holds 0 KV blocks"), (1 << 40, "more memory than cpu has free")])
def test_memory_that_cannot_be_had_is_refused(memory_mb: int, words: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_memory_mb = {memory_mb} .*{words}"):
        KVCache(SHAPE, memory_mb, 16, torch.float32, torch.device("cpu"))
