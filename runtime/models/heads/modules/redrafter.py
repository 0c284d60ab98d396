"""ReDrafter (arXiv:2403.09919): a recurrent drafter that reads the target's newest state throughout a draft."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from runtime.models.heads.modules.medusa import ResBlock
from runtime.models.heads.sharpness import Sharpness


class RedrafterHead(nn.Module):
    """s_i = SiLU(W e(y_{i−1}) + U s_{i−1} + b), or e + s without `rnn`; the LM head reads cat(h, s_i).

    Parameters are named as published: rnn_w, rnn_u, input_proj (where exit_dim differs from 2d), lm_head.
    embedding: (V, d), the target's, frozen. sharpness: how sure the head is of its guesses.
    """

    sharpness = Sharpness()

    def __init__(self, embedding: Tensor, num_layers: int, exit_dim: int, rnn: bool = True) -> None:
        super().__init__()
        vocab_size, width = embedding.shape
        self.rnn = rnn
        if rnn:
            self.rnn_w = nn.Linear(width, width, bias=False)
            self.rnn_u = nn.Linear(width, width)
        if exit_dim != 2 * width:
            self.input_proj = nn.Linear(2 * width, exit_dim)
        blocks = (ResBlock(exit_dim) for _ in range(num_layers))
        self.lm_head = nn.Sequential(*blocks, nn.Linear(exit_dim, vocab_size, bias=False))
        self.register_buffer("embedding", embedding, persistent=False)

    def advance(self, state: Tensor, tokens: Tensor) -> Tensor:
        """state: (…, d), 0 before the root; tokens: (…) → the state after these tokens, (…, d)."""
        embedded = functional.embedding(tokens, self.get_buffer("embedding"))
        if not self.rnn:
            return embedded + state
        return functional.silu(self.rnn_w(embedded) + self.rnn_u(state))

    def logits(self, target_state: Tensor, state: Tensor) -> Tensor:
        """target_state, state: (…, d) → logits of the next token, (…, V)."""
        both = torch.cat([target_state, state], dim=-1)
        if hasattr(self, "input_proj"):
            both = self.input_proj(both)
        logits: Tensor = self.lm_head(both)
        return logits
