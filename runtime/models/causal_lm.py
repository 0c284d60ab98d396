"""A causal language model from transformers that runs with our attention; knows neither files nor requests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from orchestrator.core.types import HiddenStates
from runtime.engine.kv.batch import Pass, Segment
from runtime.engine.kv.cache import CacheShape, KVCache
from runtime.models.attention import NAME, paged_tree_attention
from runtime.models.features import FeatureTap
from runtime.models.fused import compile_kernels, fuse_layers, fuse_norms, pack_linears
from runtime.models.native.families import windows

AttentionInterface.register(NAME, paged_tree_attention)

# The length of one part of a long context (PagedModel.max_pass_tokens); a pass rarely has more rows.
MAX_PREPARED_ROWS = 256


class CausalModel:
    """The forward pass of one model over a `Pass`.

    vocab_size: rows of the output embedding. max_positions: the longest context. has_windows: whether any layer has a
    sliding window.
    """

    kernels = "torch"

    def __init__(self, model: Any, device: torch.device, features: HiddenStates = HiddenStates.NONE) -> None:
        text_config = model.config.get_text_config()
        self.model = model
        self.device = device
        self.dtype: torch.dtype = model.dtype
        self.vocab_size: int = text_config.vocab_size
        self.max_positions: int = text_config.max_position_embeddings
        self.has_windows = any(windows(text_config))
        self._tap = FeatureTap(model, features)
        self.feature_columns = self._tap.columns
        self.cache_shape = CacheShape(
            num_layers=text_config.num_hidden_layers,
            num_kv_heads=getattr(text_config, "num_key_value_heads", None) or text_config.num_attention_heads,
            head_dim=getattr(text_config, "head_dim", None)
            or text_config.hidden_size // text_config.num_attention_heads,
            feature_width=self._tap.num_states * text_config.hidden_size,
        )

    def prepare(self) -> None:
        """Compile the kernels for this thread; call it on the thread that will call `forward`."""
        compile_kernels(self.model, MAX_PREPARED_ROWS)

    def new_cache(self, memory_mb: int, block_tokens: int) -> KVCache:
        """Return empty blocks of `block_tokens` tokens each."""
        return KVCache(self.cache_shape, memory_mb, block_tokens, self.dtype, self.device)

    @torch.inference_mode()
    def forward(self, batch: Pass[Segment], cache: KVCache) -> Tensor:
        """Compute a pass and write its keys, values and features to the cache.

        Return the logits of every root and node, (rows, V), in the model's dtype.
        """
        output = self.model(
            input_ids=batch.ids,
            position_ids=batch.positions,
            use_cache=False,
            logits_to_keep=batch.outputs,
            batch=batch,
            cache=cache,
        )
        if self._tap.num_states:
            cache.features[batch.slots] = self._tap.take()
        logits: Tensor = output.logits[0]
        return logits


def adapt(model: Any, features: HiddenStates = HiddenStates.NONE) -> CausalModel:
    """Turn a stock transformers model, in place, into one that runs a `Pass`."""
    fuse_norms(model)
    fuse_layers(model)
    pack_linears(model, model.device, model.dtype)
    model.set_attn_implementation(NAME)
    return CausalModel(model, model.device, features)
