"""Tiny GGUF files, written with gguf's own writer from a transformers model and a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(file: Path, model: Any, kind: str, tokenizer: Tokenizer, pre: str = "gpt-2", **keys: Any) -> None:
    """Write a model of Llama's family; its weights become those that the file holds.

    kind: format of the matrices; vectors are float32. keys: more metadata, strings and booleans.
    """
    import torch

    config, state = model.config, model.state_dict()
    writer = GGUFWriter(file, config.model_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(model.model.layers[0].self_attn.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    write_tokenizer(writer, tokenizer, pre)
    for key, value in keys.items():
        (writer.add_bool if isinstance(value, bool) else writer.add_string)(key.replace("__", "."), value)
    for name, weight in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = weight.float().numpy()
        format_ = GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        stored = quantize(_in_pairs(name, values, config), format_)
        weight.copy_(torch.from_numpy(_in_halves(name, dequantize(stored, format_), config)))
        writer.add_tensor(_gguf_name(name), stored, raw_dtype=format_)
    if config.rope_parameters["rope_type"] == "llama3":
        frequencies = model.model.rotary_emb.inv_freq
        plain = config.rope_parameters["rope_theta"] ** -(torch.arange(len(frequencies)) / len(frequencies))
        writer.add_tensor("rope_freqs.weight", (plain / frequencies).float().numpy())
    finish(writer)


def write_tokenizer(writer: GGUFWriter, tokenizer: Tokenizer, pre: str) -> None:
    """Add a byte-level tokenizer, or SentencePiece's BPE if `pre` is empty; id 0 is the end of a text."""
    document = json.loads(tokenizer.to_str())
    vocabulary, merges = document["model"]["vocab"], document["model"]["merges"]
    added = {entry["id"]: entry["special"] for entry in document["added_tokens"]}
    tokens = sorted({**vocabulary, **{entry["content"]: entry["id"] for entry in document["added_tokens"]}}.items(),
                    key=lambda pair: pair[1])  # fmt: skip
    writer.add_tokenizer_model("gpt2" if pre else "llama")
    kinds = [_kind(token, index, added) for token, index in tokens]
    writer.add_token_list([token for token, _ in tokens])
    writer.add_token_types(kinds)
    if pre:
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([" ".join(pair) for pair in merges])
    else:
        ranks = {"".join(pair): -float(rank) for rank, pair in reversed(list(enumerate(merges)))}
        writer.add_token_scores([ranks.get(token, -1e6) for token, _ in tokens])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)


def finish(writer: GGUFWriter) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _kind(token: str, index: int, added: dict[int, bool]) -> int:
    if index in added:
        return 3 if added[index] else 4
    return 2 if token == "<unk>" else 6 if token.startswith("<0x") else 1


def _gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in NAMES:
        return f"{NAMES[module]}.{kind}"
    index, _, part = module.removeprefix("model.layers.").partition(".")
    return f"blk.{index}.{NAMES[part]}.{kind}"


def _num_heads(name: str, config: Any) -> int:
    """Return the heads of queries or keys whose rows llama.cpp's converter moves; 0 = none."""
    if config.model_type != "llama":
        return 0
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    return next((number for part, number in heads.items() if part in name), 0)


def _in_pairs(name: str, values: Any, config: Any) -> Any:
    """Return rows as llama.cpp rotates them: 2i with 2i + 1, where transformers rotates i with i + head_dim / 2."""
    if not (heads := _num_heads(name, config)):
        return values
    return np.ascontiguousarray(values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape))


def _in_halves(name: str, values: Any, config: Any) -> Any:
    if not (heads := _num_heads(name, config)):
        return values
    return np.ascontiguousarray(values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape))
