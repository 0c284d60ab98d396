"""Writes a Llama checkpoint as a GGUF file, so that llama.cpp computes with the same weights.

Source: the tensor names and metadata keys that llama.cpp's `gguf` package lists for the architecture `llama`; the order
of the rotated dimensions that llama.cpp expects is that of its converter (`LlamaModel.permute`, conversion of
`q_proj` and `k_proj`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

#: Name in transformers → name in GGUF, for the tensors of a layer.
LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
MODEL_TENSORS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
#: dtype of the matrices → its name in GGUF.
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class UnsupportedCheckpoint(Exception):
    """A checkpoint that this script does not convert; the message says why."""


def write_gguf(checkpoint: str | Path, file: Path, dtype: str) -> None:
    """Write a checkpoint's weights and shape; without a tokenizer, since the benchmark sends token ids.

    dtype: of the matrices, one of DTYPES; vectors are always float32. Raises UnsupportedCheckpoint.
    """
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    config = model.config
    if config.model_type != "llama" or config.rope_parameters["rope_type"] != "default":
        raise UnsupportedCheckpoint(f"{checkpoint}: only plain Llama checkpoints are converted for llama.cpp")
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    for name, weight in model.state_dict().items():
        values = _rotated_in_pairs(name, weight, config).numpy()
        kind = GGMLQuantizationType[DTYPES[dtype] if values.ndim > 1 else "F32"]
        writer.add_tensor(gguf_name(name), quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """Return the GGUF name of a tensor of transformers' Llama."""
    module = name.removesuffix(".weight")
    if module in MODEL_TENSORS:
        return f"{MODEL_TENSORS[module]}.weight"
    index, _, part = module.removeprefix("model.layers.").partition(".")
    return f"blk.{index}.{LAYER_TENSORS[part]}.weight"


def _rotated_in_pairs(name: str, weight: Tensor, config: Any) -> Tensor:
    """Return the rows of q_proj and k_proj in llama.cpp's order; other tensors as they are.

    transformers rotates dimension i with i + head_dim / 2, llama.cpp rotates 2i with 2i + 1.
    """
    for projection, num_heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
        if projection in name:
            return weight.view(num_heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
    return weight
