"""Attention of a pass over the paged cache, registered with transformers under the name NAME."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from runtime.engine.kv.batch import Pass
from runtime.engine.kv.cache import KVCache

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
    """Write the row's keys and values to the cache, then let the segments of each group attend to their own slots.

    query: (1, H, N, d), key and value: (1, H_kv, N, d), one row of N tokens, with rotary positions applied.
    s_aux: (H,) attention sinks. Returns (1, N, H, d).
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    store = cache.kv[layer]
    store[0].index_copy_(1, batch.slots, key[0])
    store[1].index_copy_(1, batch.slots, value[0])
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    outputs = []
    for group, own in zip(batch.groups, batch.by_group(query), strict=True):
        by_key = own.reshape(group.size, num_kv_heads, -1, own.shape[3])
        bias = group.bias(sliding_window, num_heads // num_kv_heads, batch.dtype)
        output = _attend(by_key, *group.keys_and_values(store), bias, scaling, softcap, s_aux)
        outputs.append(output.reshape(group.size, num_heads, group.num_rows, -1))
    return batch.in_row(outputs), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return the attention output of a group of B segments, (B, H_kv, groups · n, d).

    query: (B, H_kv, groups · n, d), the heads that share a key head one after another. key, value: (B, H_kv, slots, d).
    bias: (B, 1, groups · n, slots). sinks: (H,), an extra logit per head, whose share of the softmax is discarded.
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
    size, num_kv_heads, rows, _ = scores.shape
    num_equal = num_kv_heads * rows // sinks.numel()
    column = sinks.to(scores.dtype).repeat_interleave(num_equal).view(1, num_kv_heads, rows, 1).expand(size, -1, -1, -1)
    return torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1] @ value
