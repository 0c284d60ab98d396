"""Copies weights into the native library's decoder layers, arranged as its products read them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from native.failures import check
from runtime.models.quantized import Quantized, QuantizedMatrix, combined

#: Outputs per block of packed weights (product.h, kBlock); gate and up alternate block by block.
BLOCK = 32


class Weights:
    """The weights of one native model, given by its handle. Layer −1 stands for the model itself.

    quantized: the matrices that are copied in quantised form.
    """

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p, quantized: Quantized) -> None:
        self._library, self._handle, self._quantized = library, handle, quantized

    def set_linear(
        self, layer: int, name: str, *parts: Tensor, arrange: Callable[[list[Tensor]], Tensor] = torch.cat
    ) -> None:
        """Copy a matrix (out, in), which may consist of several; arrange: see `combined`."""
        matrix = combined(self._quantized, arrange, list(parts))
        place = self._handle, layer, name.encode()
        if isinstance(matrix, QuantizedMatrix):
            blocks = matrix.blocks.contiguous()
            wrong = self._library.native_set_quantized(*place, matrix.number, blocks.data_ptr(), *matrix.shape)
        else:
            values = matrix.float().contiguous()
            wrong = self._library.native_set_linear(*place, values.data_ptr(), *values.shape)
        check(wrong, f"copying the matrix {name!r}")

    def set_vector(self, layer: int, name: str, vector: Tensor) -> None:
        """Copy a vector."""
        values = vector.detach().float().contiguous()
        wrong = self._library.native_set_vector(self._handle, layer, name.encode(), values.data_ptr(), values.numel())
        check(wrong, f"copying the vector {name!r}")

    def set_decoder_layer(self, index: int, layer: Any) -> None:
        """Copy the matrices of a decoder layer (self_attn, mlp), its biases, and the norm before its MLP."""
        attention, mlp = layer.self_attn, layer.mlp
        if hasattr(attention, "qkv_proj"):  # Phi-3
            self.set_linear(index, "qkv", attention.qkv_proj.weight)
            self.set_linear(
                index, "gate_up", mlp.gate_up_proj.weight, arrange=lambda parts: alternate(*parts[0].chunk(2))
            )
        else:
            projections = attention.q_proj, attention.k_proj, attention.v_proj
            self.set_linear(index, "qkv", *(projection.weight for projection in projections))
            self.set_linear(
                index, "gate_up", mlp.gate_proj.weight, mlp.up_proj.weight, arrange=lambda parts: alternate(*parts)
            )
            if attention.q_proj.bias is not None:
                self.set_vector(index, "qkv_bias", torch.cat([projection.bias for projection in projections]))
        self.set_linear(index, "output", attention.o_proj.weight)
        self.set_linear(index, "down", mlp.down_proj.weight)
        self.set_vector(index, "mlp_norm", layer.post_attention_layernorm.weight)


def alternate(gate: Tensor, up: Tensor) -> Tensor:
    """Return gate and up, of F rows each, in alternating blocks of BLOCK rows, the last ones padded with zeros."""
    padding = gate.new_zeros((-len(gate) % BLOCK, *gate.shape[1:]))
    blocks = [torch.cat([weight, padding]).unflatten(0, (-1, BLOCK)) for weight in (gate, up)]
    return torch.stack(blocks, dim=1).flatten(0, 2)
