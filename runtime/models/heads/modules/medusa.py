"""Medusa's heads (arXiv:2401.10774): head k predicts the token k + 1 places after the root from the newest state."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from orchestrator.core.static_trees import best_choices, usual_accuracy
from orchestrator.core.tree import MAX_NODES
from runtime.models.fused import BorrowedLinear
from runtime.models.heads.sharpness import Sharpness

#: Accuracy of the first head, and the factor for each head after it, if accuracy was not measured.
PRIOR_ACCURACY = (0.6, 0.8)


class ResBlock(nn.Module):
    """x + SiLU(W x + b); W and b start at 0, so that a new head gives the output of the target's LM head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: (…, width) → (…, width)."""
        return x + functional.silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """K heads, each with residual blocks and an LM head; parameters are named as published: k.l.linear, k.L.weight.

    default_choices: the static tree for a request that sets no shape, its best nodes first. sharpness: how sure the
    heads are of their guesses.
    """

    sharpness = Sharpness()

    def __init__(self, num_heads: int, num_layers: int, lm_head: Tensor, own_outputs: bool = True) -> None:
        """lm_head: (V, d), the target's. own_outputs: each head starts with its own copy; False: all use lm_head."""
        super().__init__()
        self.default_choices = best_choices(usual_accuracy(num_heads, *PRIOR_ACCURACY), MAX_NODES)
        self.vocab_size, width = lm_head.shape
        borrowed = BorrowedLinear(lm_head)
        for _ in range(num_heads):
            output: nn.Module = borrowed
            if own_outputs:
                output = nn.Linear(width, self.vocab_size, bias=False, device="meta")
                output.weight = nn.Parameter(lm_head.detach().clone())
            self.append(nn.Sequential(*(ResBlock(width) for _ in range(num_layers)), output))
