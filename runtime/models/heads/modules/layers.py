"""The decoder layers of the EAGLE heads; the caller decides what each row attends to.

Modules are named as the published checkpoints name their tensors (docs/heads-formats.md).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, apply_rotary_pos_emb

#: (module, query (B, H, n, e), key, value (B, H_kv, n, e)) → (B, n, H, e).
Attend = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]


def attend_causally(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Let row i attend to the rows 0 … i, as in training."""
    output = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return output.transpose(1, 2)


class HeadAttention(nn.Module):
    """Attention with rotary positions over inputs of `in_features` numbers."""

    layer_idx = 0

    def __init__(self, config: LlamaConfig, in_features: int) -> None:
        super().__init__()
        self.head_dim = head_dim(config)
        width = config.num_attention_heads * self.head_dim
        kv_width = (config.num_key_value_heads or config.num_attention_heads) * self.head_dim
        self.q_proj = nn.Linear(in_features, width, bias=config.attention_bias)
        self.k_proj = nn.Linear(in_features, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(in_features, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """x: (B, n, in_features), positions: (B, n) → (B, n, d)."""
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *self.rotary(x, positions))
        output: Tensor = self.o_proj(attend(self, query, key, value).flatten(2))
        return output


class EagleLayer(nn.Module):
    """EAGLE-1's decoder layer: no norm before its attention."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = HeadAttention(config, config.hidden_size)
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = norm_of(config)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """x: (B, n, d), positions: (B, n) → (B, n, d)."""
        x = x + self.self_attn(x, positions, attend)
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


class Eagle3Layer(nn.Module):
    """EAGLE-3's decoder layer: attention reads the normed embedding and the normed state; the residual is the state.

    norms_residual: the residual is the normed state.
    """

    def __init__(self, config: LlamaConfig, norms_residual: bool = False) -> None:
        super().__init__()
        self.norms_residual = norms_residual
        self.self_attn = HeadAttention(config, 2 * config.hidden_size)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = norm_of(config)
        self.hidden_norm = norm_of(config)
        self.post_attention_layernorm = norm_of(config)

    def forward(self, embedded: Tensor, state: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """embedded, state: (B, n, d), positions: (B, n) → (B, n, d)."""
        normed = self.hidden_norm(state)
        both = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        x = (normed if self.norms_residual else state) + self.self_attn(both, positions, attend)
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


def norm_of(config: LlamaConfig) -> nn.RMSNorm:
    """Return a root-mean-square norm over the hidden size."""
    return nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


def head_dim(config: LlamaConfig) -> int:
    """Return the width of one attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
