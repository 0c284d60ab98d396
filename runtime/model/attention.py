"""Attention of a pass over the paged cache, registered with transformers under the name NAME."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from runtime.kv.batch import Pass
from runtime.kv.cache import KVCache

NAME = "paged_tree"


def paged_tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    batch: Pass[Any],
    cache: KVCache,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Write the row's keys and values to the cache, then let each segment attend to its own slots.

    query: (1, H, N, d), key and value: (1, H_kv, N, d), one row of N tokens, with rotary positions applied.
    s_aux: (H,) attention sinks. Returns (1, N, H, d).
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    keys, values = cache.kv[layer]
    keys.index_copy_(1, batch.slots, key[0])
    values.index_copy_(1, batch.slots, value[0])
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    outputs = []
    for index, own in enumerate(query.split([segment.num_tokens for segment in batch.segments], dim=2)):
        output = _attend(
            own.reshape(1, num_kv_heads, -1, query.shape[-1]),
            batch.cached(index, keys, cache.block_tokens)[None],
            batch.cached(index, values, cache.block_tokens)[None],
            batch.bias(index, sliding_window, num_heads // num_kv_heads),
            scaling,
            softcap,
            s_aux,
        )
        outputs.append(output.reshape(1, num_heads, own.shape[2], -1))
    row = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return row.transpose(1, 2), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return the attention output of one segment, (1, H_kv, groups · n, d).

    query: (1, H_kv, groups · n, d), the heads that share a key head one after another. key, value: (1, H_kv, slots, d).
    bias: (groups · n, slots). sinks: (H,), an extra logit per head, whose share of the softmax is discarded.
    """
    if softcap is None and sinks is None:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    if sinks is None:
        return scores.softmax(dim=-1) @ value
    num_kv_heads, rows = scores.shape[1:3]
    groups = sinks.numel() // num_kv_heads
    column = sinks.to(scores.dtype).repeat_interleave(rows // groups).view(1, num_kv_heads, rows, 1)
    return torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1] @ value
