"""Copies weights into the native library's decoder layers, arranged as its products read them."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from native.failures import check

#: Outputs per block of packed weights (product.h, kBlock); gate and up alternate block by block.
BLOCK = 32


class Weights:
    """The weights of one native model, given by its handle. Layer −1 stands for the model itself."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle

    def set_linear(self, layer: int, name: str, weight: Tensor) -> None:
        """Copy a matrix (out, in)."""
        values = weight.detach().float().contiguous()
        wrong = self._library.native_set_linear(self._handle, layer, name.encode(), values.data_ptr(), *values.shape)
        check(wrong, f"copying the matrix {name!r}")

    def set_vector(self, layer: int, name: str, vector: Tensor) -> None:
        """Copy a vector, or a table row by row."""
        values = vector.detach().float().contiguous()
        wrong = self._library.native_set_vector(self._handle, layer, name.encode(), values.data_ptr(), values.numel())
        check(wrong, f"copying the vector {name!r}")

    def set_decoder_layer(self, index: int, layer: Any) -> None:
        """Copy the matrices of a decoder layer (self_attn, mlp), its biases, and the norm before its MLP."""
        for name, matrix in _linears_of(layer).items():
            self.set_linear(index, name, matrix)
        self.set_vector(index, "mlp_norm", layer.post_attention_layernorm.weight)
        attention = layer.self_attn
        if not hasattr(attention, "qkv_proj") and attention.q_proj.bias is not None:
            self.set_vector(index, "qkv_bias", torch.cat([projection.bias for projection in _projections(attention)]))


def _linears_of(layer: Any) -> dict[str, Tensor]:
    """Return the matrices (out, in) of a decoder layer by their names in the native library."""
    attention, mlp = layer.self_attn, layer.mlp
    if hasattr(attention, "qkv_proj"):  # Phi-3
        qkv = attention.qkv_proj.weight
        gate, up = mlp.gate_up_proj.weight.chunk(2)
    else:
        qkv = torch.cat([projection.weight for projection in _projections(attention)])
        gate, up = mlp.gate_proj.weight, mlp.up_proj.weight
    return {
        "qkv": qkv,
        "output": attention.o_proj.weight,
        "gate_up": alternate(gate, up),
        "down": mlp.down_proj.weight,
    }


def _projections(attention: Any) -> tuple[Any, Any, Any]:
    return attention.q_proj, attention.k_proj, attention.v_proj


def alternate(gate: Tensor, up: Tensor) -> Tensor:
    """Return gate and up, (F, d) each, in alternating blocks of BLOCK rows; the last blocks are padded with zeros."""
    padding = (0, 0, 0, -len(gate) % BLOCK)
    blocks = [functional.pad(weight, padding).unflatten(0, (-1, BLOCK)) for weight in (gate, up)]
    return torch.stack(blocks, dim=1).flatten(0, 2)
