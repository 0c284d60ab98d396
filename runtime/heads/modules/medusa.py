"""Medusa's heads (arXiv:2401.10774): head k guesses the token k places after the root from the newest state alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestrator.core.static_trees import best_choices, usual_accuracy
from orchestrator.core.tree import MAX_NODES
from runtime.model.fused import BorrowedLinear

#: Of the first head, and what is left of it with each head.
USUAL = (0.6, 0.8)


def _copy_of(weight: Tensor) -> nn.Linear:
    """Return a layer of its own that begins with this weight, (out, in)."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach().clone())
    return linear


class ResBlock(nn.Module):
    """x + SiLU(W x + b); W and b begin at 0, so that a new head says what the target's LM head says."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: (…, width) → (…, width)."""
        return x + functional.silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """K heads of residual blocks and an LM head each; parameters are named as published: k.l.linear, k.L.weight.

    own_choices: the static tree of a request that names none, its nodes the best first.
    """

    def __init__(self, num_heads: int, num_layers: int, lm_head: Tensor, own_outputs: bool = True) -> None:
        """lm_head: (V, d), the target's: every head begins with a copy of it, or borrows it (own_outputs False)."""
        super().__init__()
        borrowed = BorrowedLinear(lm_head)
        self.own_choices = best_choices(usual_accuracy(num_heads, *USUAL), MAX_NODES)
        self.vocab_size, width = lm_head.shape
        for _ in range(num_heads):
            output = _copy_of(lm_head) if own_outputs else borrowed
            self.append(nn.Sequential(*(ResBlock(width) for _ in range(num_layers)), output))

    def forward(self, state: Tensor) -> Tensor:
        """state: (n, d), the newest of each request → logits of the next K tokens but one, (n, K, V)."""
        return torch.stack([head(state) for head in self], dim=1)
