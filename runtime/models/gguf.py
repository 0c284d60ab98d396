"""The weights of a GGUF file by their names in transformers, in the file's own blocks or as exact float32."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from orchestrator.core.deployment.gguf_file import GgufFile, TensorInfo, read_gguf
from orchestrator.core.errors import ConfigError
from runtime.models.quantized import BLOCK_BYTES, Kind, QuantizedMatrix

Bytes = npt.NDArray[np.uint8]

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
BLOCK_KINDS: dict[str, Kind] = {kind: kind for kind in BLOCK_BYTES}
#: One divisor for each rotary frequency (Llama 3.1 and later); no weight of the model.
FREQUENCY_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A tensor in the blocks of its file.

    kind: the blocks' format. shape: of the values, (out, in) for a matrix. blocks: (out, bytes of a row) uint8, read
    only, backed by the file; rows are in transformers' order, so that `dequantized` needs no other.
    """

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    blocks: Bytes

    def dequantized(self) -> Tensor:
        """Return the values, which float32 holds exactly as the format defines them."""
        if self.kind == GGMLQuantizationType.F32:
            values = self.blocks.view(np.float32)
        elif self.kind == GGMLQuantizationType.F16:
            values = self.blocks.view(np.float16).astype(np.float32)
        else:
            values = dequantize(self.blocks, self.kind)
        return torch.from_numpy(np.array(values, np.float32).reshape(self.shape))


@dataclass(frozen=True, eq=False)
class GgufWeights:
    """tensors: {name in transformers: tensor}. frequency_factors: (head_dim / 2,), divide the rotary frequencies."""

    tensors: dict[str, QuantizedTensor]
    frequency_factors: Tensor | None

    def state_dict(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the values as weights of the stock model."""
        return {name: tensor.dequantized().to(dtype) for name, tensor in self.tensors.items()}

    def matrices(self, names: Iterable[str]) -> dict[str, QuantizedMatrix]:
        """Return the matrices among these names whose blocks native code multiplies."""
        found = {}
        for name in names:
            tensor = self.tensors.get(name)
            kind = BLOCK_KINDS.get(tensor.kind.name) if tensor and len(tensor.shape) == 2 else None
            if tensor and kind:
                blocks = torch.from_numpy(np.array(tensor.blocks)).unflatten(1, (-1, BLOCK_BYTES[kind]))
                found[name] = QuantizedMatrix(kind, blocks)
        return found


def read_weights(source: str) -> GgufWeights:
    """Map a file's weights into memory; raises ConfigError for a tensor that is not known or damaged."""
    file = read_gguf(Path(source))
    data = np.memmap(file.path, np.uint8, "r")
    found = {name: _tensor(file, name, info, data) for name, info in file.tensors.items()}
    factors = found.pop(FREQUENCY_FACTORS, None)
    tensors = dict(_renamed(file, found))
    return GgufWeights(tensors, factors.dequantized() if factors else None)


def _tensor(file: GgufFile, name: str, info: TensorInfo, data: Bytes) -> QuantizedTensor:
    try:
        kind = GGMLQuantizationType(info.kind)
        per_block, block_bytes = GGML_QUANT_SIZES[kind]
        if kind not in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        raise ConfigError(
            f"{file.path}: the format {info.kind} of the tensor {name} is not read (allowed: F32, F16, BF16, Q8_0, "
            "Q4_0, Q4_1, Q5_0, Q5_1 and K-quants)"
        ) from None
    row_bytes = info.shape[-1] // per_block * block_bytes if info.shape else 0
    rows = prod(info.shape[:-1])
    blocks = data[info.offset : info.offset + rows * row_bytes]
    if info.shape[-1:] == () or info.shape[-1] % per_block or len(blocks) != rows * row_bytes:
        raise ConfigError(f"{file.path}: the tensor {name} {list(info.shape)} does not fit the file, which may be cut")
    if kind.name in BLOCK_KINDS:
        ends = blocks.reshape(-1, block_bytes)[:, : 4 if kind.name == "Q4_1" else 2]
        if not np.isfinite(ends.copy().view(np.float16)).all():
            raise ConfigError(f"{file.path}: the tensor {name} holds a scale that is no finite number: it is damaged")
    return QuantizedTensor(kind, info.shape, blocks.reshape(rows, row_bytes))


def _renamed(file: GgufFile, tensors: dict[str, QuantizedTensor]) -> Iterator[tuple[str, QuantizedTensor]]:
    """Yield the tensors by their names in transformers, with the rows in its order."""
    architecture = file.get("general.architecture", str)
    heads = file.get(f"{architecture}.attention.head_count", int)
    num_heads = {"attn_q": heads, "attn_k": file.get(f"{architecture}.attention.head_count_kv", int, heads)}
    for name, tensor in tensors.items():
        layer, word, kind = match.groups() if (match := _NAME.fullmatch(name)) else (None, "", "")
        known = (_TOP if layer is None else _LAYER).get(word)
        if known is None:
            raise ConfigError(f"{file.path}: the tensor {name} is none of a {architecture} model's that is read")
        if architecture == "llama" and word in num_heads:
            tensor = _halves(tensor, num_heads[word])
        yield f"model.layers.{layer}.{known}.{kind}" if layer is not None else f"{known}.{kind}", tensor


def _halves(tensor: QuantizedTensor, num_heads: int) -> QuantizedTensor:
    """Return queries or keys whose rotated pairs lie in halves of a head, as in transformers, not side by side.

    A bias is one row, so its numbers are moved, each of `size` bytes.
    """
    rows = tensor.blocks if len(tensor.shape) > 1 else tensor.blocks.reshape(tensor.shape[0], -1)
    moved = rows.reshape(num_heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(tensor.blocks.shape)
    return QuantizedTensor(tensor.kind, tensor.shape, moved)
