"""Llama's decoder layer with fewer, larger operations; the same arithmetic, checked at load like everything else.

A step of a small model is mostly the overhead of its many small operations (docs/performance.md): one product
for queries, keys and values, one for gate and up, one rotation for queries and keys together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from runtime.attention import paged_tree_attention


class LeanLayer(nn.Module):
    """Takes over the weights of a LlamaDecoderLayer."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer_idx: int = attention.layer_idx
        self.head_dim: int = attention.head_dim
        self.scaling: float = attention.scaling
        self.num_heads = attention.q_proj.out_features // self.head_dim
        self.num_kv_heads = attention.k_proj.out_features // self.head_dim
        self.input_norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.qkv = _side_by_side(attention.q_proj, attention.k_proj, attention.v_proj)
        self.output = attention.o_proj
        self.gate_up = _side_by_side(mlp.gate_proj, mlp.up_proj)
        self.down = mlp.down_proj

    def forward(self, hidden: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **paged: Any) -> Tensor:
        """hidden: (1, N, d) → (1, N, d). paged: what `paged_tree_attention` needs, handed through by the model."""
        hidden = hidden + self._attend(self.input_norm(hidden), position_embeddings, paged)
        gate, up = self.gate_up(self.mlp_norm(hidden)).chunk(2, dim=-1)
        down: Tensor = self.down(functional.silu(gate) * up)
        return hidden + down

    def _attend(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], paged: dict[str, Any]) -> Tensor:
        heads = self.qkv(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        num_rotated = self.num_heads + self.num_kv_heads
        rotated = _rotate(heads[:, :num_rotated], *rotation)
        query, key = rotated[:, : self.num_heads], rotated[:, self.num_heads :]
        value = heads[:, num_rotated:]
        attended, _ = paged_tree_attention(
            self, query, key, value, None, scaling=self.scaling, batch=paged["batch"], cache=paged["cache"]
        )
        result: Tensor = self.output(attended.flatten(2))
        return result


def _side_by_side(*linears: nn.Linear) -> nn.Linear:
    """Return one layer whose output is the outputs of several, one behind the other."""
    first = linears[0]
    joined = nn.Linear(first.in_features, sum(linear.out_features for linear in linears), device="meta")
    joined.weight = nn.Parameter(torch.cat([linear.weight.detach() for linear in linears]), requires_grad=False)
    joined.bias = None  # type: ignore[assignment]
    if first.bias is not None:
        joined.bias = nn.Parameter(torch.cat([linear.bias.detach() for linear in linears]), requires_grad=False)
    return joined


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions; heads: (1, H, N, d), cos and sin: (1, N, d)."""
    half = heads.shape[-1] // 2
    turned = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
    return heads * cos[:, None] + turned * sin[:, None]


def make_lean(model: Any) -> int:
    """Replace every plain Llama layer, and return their number; other families keep their own."""
    layers = getattr(model.get_decoder(), "layers", nn.ModuleList())
    replaced = 0
    for index, layer in enumerate(layers):
        if type(layer) is LlamaDecoderLayer and layer.mlp.config.hidden_act == "silu":
            layers[index] = LeanLayer(layer)
            replaced += 1
    return replaced
