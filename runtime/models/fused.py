"""Fewer, larger operations with the same results: fused norms, packed linear layers, a fused Llama decoder layer.

Most of a small model's step is the overhead of its many small operations (docs/performance.md). The check at load
compares the results with the stock model's (runtime/models/check.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from runtime.models.attention import paged_tree_attention


def _replace_modules(model: nn.Module, replacement: Callable[[Any], nn.Module | None]) -> None:
    """Replace every submodule for which `replacement` returns a module, one by one, so that each old one is freed."""
    for name in [name for name, _ in model.named_children()]:
        child = getattr(model, name)
        if (new := replacement(child)) is not None:
            setattr(model, name, new)
        else:
            _replace_modules(child, replacement)


@torch.no_grad()
def fuse_norms(model: nn.Module) -> None:
    """Replace every norm that torch's RMSNorm reproduces.

    transformers' own norms round to float32 internally; nothing else keeps a float64 model from being exact.
    """
    _replace_modules(model, _fused_norm)


def _fused_norm(norm: nn.Module) -> nn.RMSNorm | None:
    """Return torch's equivalent of an RMS norm, else None; families scale by the weight or by 1 + weight."""
    weight = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not type(norm).__name__.endswith("RMSNorm") or not isinstance(eps, float):
        return None
    if not isinstance(weight, Tensor) or weight.ndim != 1:
        return None
    probe = torch.linspace(-2.0, 3.0, weight.numel(), dtype=weight.dtype, device=weight.device)
    tolerance = {torch.bfloat16: 0.05, torch.float16: 0.01}.get(weight.dtype, 1e-5)
    expected = norm(probe)
    # Both candidates are within bfloat16's tolerance where weights are large; the closer one is right.
    fused = min(
        (_rms_norm(scale, eps) for scale in (weight, 1.0 + weight)),
        key=lambda candidate: float((candidate(probe) - expected).abs().max()),
    )
    return fused if torch.allclose(fused(probe), expected, rtol=tolerance, atol=tolerance) else None


def _rms_norm(weight: Tensor, eps: float) -> nn.RMSNorm:
    """Return the norm weight · x ÷ rms(x), in x's dtype."""
    norm = nn.RMSNorm(weight.shape, eps)
    norm.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
    return norm


class BorrowedLinear(nn.Module):
    """y = x Wᵀ for another model's W, (out, in); the module that uses it neither trains nor stores W."""

    bias = None

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("weight", weight, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (…, in) → (…, out)."""
        return functional.linear(x, self.get_buffer("weight"))


class PackedLinear(nn.Module):
    """y = x Wᵀ + b for a fixed W. in_features, out_features: as in nn.Linear.

    oneDNN compiles a kernel of 0.6 MB for each number of rows, in 10 ms, and keeps the last 1,024 kernels twice
    (measured: 700 MB after a while). So the number of rows is padded to one of a few.
    """

    def __init__(self, linear: nn.Linear | BorrowedLinear) -> None:
        super().__init__()
        weight = cast(Tensor, linear.weight)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias, self.dtype = linear.bias, weight.dtype
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        """x: (…, rows, in_features) → (…, rows, out_features)."""
        rows = x.shape[-2]
        missing = padded_rows(rows) - rows
        if missing:
            x = functional.pad(x, (0, 0, 0, missing))
        result = cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], ""))
        return result.narrow(-2, 0, rows) if missing else result


def padded_rows(rows: int) -> int:
    """Return the smallest of 1 … 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, … that is at least `rows`."""
    step = 1 << max((rows - 1).bit_length() - 3, 0)
    return -(-rows // step) * step


@torch.inference_mode()
def compile_kernels(model: nn.Module, max_rows: int) -> None:
    """Compile the packed layers' kernels for up to `max_rows` rows; oneDNN keeps them for the calling thread."""
    # A kernel is compiled for the thread's number of threads, which torch sets in a new thread on this call only.
    torch.get_num_threads()
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    for layer in {(layer.in_features, layer.out_features): layer for layer in layers}.values():
        for rows in {padded_rows(rows) for rows in range(1, max_rows + 1)}:
            layer(torch.zeros(1, rows, layer.in_features, dtype=layer.dtype))


def pack_linears(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Pack every linear layer of a float32 or bfloat16 model on a CPU, if this build of torch can."""
    if device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and _can_pack(dtype):
        linears = (nn.Linear, BorrowedLinear)
        _replace_modules(model, lambda child: PackedLinear(child) if type(child) in linears else None)


def _can_pack(dtype: torch.dtype) -> bool:
    """True when this build of torch has the packed operators, and they agree with its own product.

    The operators are not public: another torch may lack them, or may have given their names to other operators.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    linear = nn.Linear(48, 32, dtype=dtype)
    x = torch.linspace(-1.0, 1.0, 5 * 48, dtype=dtype).view(1, 5, 48)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    try:
        packed = PackedLinear(linear)(x)
    except (AttributeError, RuntimeError, TypeError):
        return False
    return torch.allclose(packed, linear(x), rtol=tolerance, atol=tolerance)


class FusedLayer(nn.Module):
    """A LlamaDecoderLayer with one product for queries, keys and values, one for gate and up, and one rotation."""

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
        """hidden: (1, N, d) → (1, N, d). paged: the pass and the cache, for `paged_tree_attention`."""
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
    """Return one layer whose output is the concatenated output of several."""
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


def fuse_layers(model: nn.Module) -> None:
    """Replace every plain Llama layer; other families keep their own layers."""

    def replacement(child: Any) -> FusedLayer | None:
        is_plain = type(child) is LlamaDecoderLayer and child.mlp.config.hidden_act == "silu"
        return FusedLayer(child) if is_plain else None

    _replace_modules(model, replacement)
