"""Quantised matrices in the block formats of GGUF files: 32 consecutive inputs of an output share a scale.

A block of Q8_0 is a float16 scale d, then 32 int8 q: the weights are d · q. A block of Q4_0 is d, then 16 bytes that
hold 0 ≤ q ≤ 15 (byte i: input i in its lower half, input i + 16 in its upper half): d · (q − 8). A block of Q4_1 is d,
a float16 minimum m, then the same bytes: d · q + m.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from runtime.models.fused import BorrowedLinear

Kind = Literal["Q8_0", "Q4_0", "Q4_1"]

BLOCK = 32
#: Kind → bytes of a block. The order is that of native::Quantization.
BLOCK_BYTES: dict[Kind, int] = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix (outputs, inputs). blocks: (outputs, inputs / BLOCK, BLOCK_BYTES[kind]) uint8."""

    kind: Kind
    blocks: Tensor

    def __post_init__(self) -> None:
        shape, size = tuple(self.blocks.shape), BLOCK_BYTES[self.kind]
        if self.blocks.dtype != torch.uint8 or len(shape) != 3 or shape[2] != size:
            raise ValueError(
                f"blocks of {self.kind} must be (outputs, n, {size}) uint8, got {shape} {self.blocks.dtype}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.blocks.shape[0], self.blocks.shape[1] * BLOCK

    @property
    def number(self) -> int:
        """The kind as `native::Quantization`."""
        return list(BLOCK_BYTES).index(self.kind)

    def dequantized(self) -> Tensor:
        """Return the weights, float32."""
        scales = self._halves(0)
        if self.kind == "Q8_0":
            return (scales * self.blocks[..., 2:].view(torch.int8)).flatten(1)
        packed = self.blocks[..., -BLOCK // 2 :]
        quants = torch.cat([packed & 15, packed >> 4], dim=-1).float()
        return (scales * (quants - 8) if self.kind == "Q4_0" else scales * quants + self._halves(2)).flatten(1)

    def _halves(self, first: int) -> Tensor:
        return self.blocks[..., first : first + 2].contiguous().view(torch.float16).float()


#: The id of a module's weight → its quantised form. Matrices that are missing stay as they are.
Quantized = Mapping[int, QuantizedMatrix]


def quantize(weight: Tensor) -> QuantizedMatrix:
    """Quantise a matrix (outputs, inputs) to Q8_0.

    A block's scale is max |w| ÷ 127, rounded to float16; its quants are w ÷ scale, rounded to even, at most ±127. So a
    matrix that was dequantised from Q8_0 blocks with quants of ±127 keeps its values.
    """
    values = weight.detach().float().unflatten(1, (-1, BLOCK))
    scales = (values.abs().amax(dim=-1, keepdim=True) / 127).half()
    quants = (values / scales.float()).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).round().clamp(-127, 127)
    return QuantizedMatrix(
        "Q8_0", torch.cat([scales.view(torch.uint8), quants.to(torch.int8).view(torch.uint8)], dim=-1)
    )


def quantize_linears(
    model: nn.Module, given: Mapping[str, QuantizedMatrix] | None = None
) -> dict[int, QuantizedMatrix]:
    """Return the quantised form of each linear layer that native code can multiply by blocks, else Q8_0.

    given: matrices that are already quantised, by their names in the model; embeddings among them are kept, too.
    """
    given = given or {}
    names = {id(weight): name for name, weight in model.named_parameters()}
    found = {id(module.weight): given.get(names.get(id(module.weight), "")) for module in linears(model)}
    quantized = {id(each.weight): found[id(each.weight)] or quantize(each.weight) for each in linears(model)}
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    return {id(table): given[names[id(table)]] for table in tables if names[id(table)] in given} | quantized


def linears(model: nn.Module) -> list[Any]:
    """Return the linear layers whose inputs native code can quantise: it writes whole blocks at a time.

    The attention of one key head, which is written at once, may be no whole blocks for o_proj.
    """
    modules: list[Any] = list(model.modules())
    cut = {id(module.o_proj) for module in modules if hasattr(module, "o_proj") and _key_head_size(module) % BLOCK}
    products: list[Any] = [
        module for module in modules if isinstance(module, nn.Linear | BorrowedLinear) and id(module) not in cut
    ]
    return [module for module in products if module.weight.shape[1] % BLOCK == 0]


def _key_head_size(attention: Any) -> int:
    """Return how many inputs of o_proj come from the heads of one key head."""
    groups = getattr(attention, "num_key_value_groups", None)
    return int(attention.head_dim * (groups or attention.o_proj.in_features // attention.k_proj.out_features))


def combined(
    quantized: Quantized, arrange: Callable[[list[Tensor]], Tensor], parts: list[Tensor]
) -> Tensor | QuantizedMatrix:
    """Return one matrix made of several, quantised if all of them are, in the same way.

    arrange: combines matrices along their outputs (dim 0) or inputs (dim 1); it gets blocks where these are the rows.
    """
    found = [quantized.get(id(part)) for part in parts]
    blocks = [each for each in found if each and each.kind == found[0].kind] if found[0] else []
    if len(blocks) < len(parts):
        return arrange([part.detach() for part in parts])
    return QuantizedMatrix(blocks[0].kind, arrange([each.blocks for each in blocks]))
