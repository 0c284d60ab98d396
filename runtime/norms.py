"""Root-mean-square norms that compute in the model's own dtype: exact in float64, one fused call in the others."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class FusedRMSNorm(nn.Module):
    """weight · x ÷ rms(x), in x's dtype."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: (…, d) → (…, d)."""
        return functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


@torch.no_grad()
def fuse_norms(model: nn.Module) -> int:
    """Replace every norm that FusedRMSNorm reproduces, and return their number.

    transformers' own norms round to float32 on the way, which is the one step that keeps a float64
    model from being exact; a norm of another form is left as it is.
    """
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            fused = _fused(child) if type(child).__name__.endswith("RMSNorm") else None
            if fused is not None:
                setattr(parent, name, fused)
                replaced += 1
    return replaced


def _fused(norm: nn.Module) -> FusedRMSNorm | None:
    """Return the equivalent of `norm`, found by trying: some families scale by the weight, others by 1 + weight."""
    weight = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(weight, Tensor) or weight.ndim != 1 or not isinstance(eps, float):
        return None
    probe = torch.linspace(-2.0, 3.0, weight.numel(), dtype=weight.dtype, device=weight.device)
    tolerance = {torch.bfloat16: 0.05, torch.float16: 0.01}.get(weight.dtype, 1e-5)
    expected = norm(probe)
    # Large weights lie within bfloat16's tolerance of 1 + weight: the nearer candidate is the one.
    fused = min(
        (FusedRMSNorm(scale, eps) for scale in (weight, 1.0 + weight)),
        key=lambda candidate: float((candidate(probe) - expected).abs().max()),
    )
    same = torch.allclose(fused(probe), expected, rtol=tolerance, atol=tolerance)
    return fused if same else None
