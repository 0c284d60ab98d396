"""Small random drafting heads in the formats of their authors (docs/heads-formats.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

Tensors = dict[str, np.ndarray]

MEDUSA_FILES = {"safetensors": "medusa_lm_head.safetensors", "pt": "medusa_lm_head.pt"}
MODEL_FILES = {"safetensors": "model.safetensors", "pt": "pytorch_model.bin"}
COPIED = ("intermediate_size", "max_position_embeddings", "num_attention_heads", "num_key_value_heads", "vocab_size")


class Source:
    """Random tensors of one seed."""

    def __init__(self, seed: int) -> None:
        self.numbers = np.random.default_rng(seed)

    def matrix(self, out_size: int, in_size: int) -> np.ndarray:
        """Return a weight (out_size, in_size) that keeps the scale of its input."""
        return self.numbers.normal(0.0, in_size**-0.5, (out_size, in_size))

    def vector(self, size: int) -> np.ndarray:
        """Return a bias (size,)."""
        return self.numbers.normal(0.0, 0.5, size)

    def scale(self, size: int) -> np.ndarray:
        """Return the weight (size,) of an RMSNorm."""
        return self.numbers.uniform(0.5, 1.5, size)

    def table(self, rows: int, size: int) -> np.ndarray:
        """Return an embedding or an LM head (rows, size), spread widely so that its logits differ."""
        return self.numbers.normal(0.0, 1.0, (rows, size))


def write_medusa(
    folder: Path,
    hidden_size: int,
    vocab_size: int,
    num_heads: int,
    num_layers: int = 1,
    seed: int = 0,
    file: str = "safetensors",
    dtype: str = "float32",
    lm_heads: bool = True,
    repeated_block: bool = True,
    config_num_heads: int | None = None,
) -> Path:
    """Write Medusa heads (`{head}.{layer}.linear.*`, `{head}.{num_layers}.weight`) and return the folder.

    The authors' code repeats one block instance, so all layers of a head have the same numbers unless
    `repeated_block` is false. `lm_heads=False` is their later layout (`version` "2"): blocks only, and the base LM head
    for all. `config_num_heads` is written to config.json; it may differ from the file's number, as in published heads.
    """
    source = Source(seed)
    tensors: Tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            block = f"{head}.{layer}.linear."
            if layer and repeated_block:
                tensors |= {block + kind: tensors[f"{head}.0.linear.{kind}"] for kind in ("weight", "bias")}
            else:
                tensors[block + "weight"] = source.matrix(hidden_size, hidden_size)
                tensors[block + "bias"] = source.vector(hidden_size)
        if lm_heads:
            tensors[f"{head}.{num_layers}.weight"] = source.table(vocab_size, hidden_size)
    config: dict[str, Any] = {
        "base_model_name_or_path": "base",
        "medusa_num_heads": num_heads if config_num_heads is None else config_num_heads,
        "medusa_num_layers": num_layers,
        "transformers_version": "4.31.0",
    }
    return _write(folder, tensors, config if lm_heads else config | {"version": "2"}, MEDUSA_FILES[file], dtype)


def write_eagle(
    folder: Path,
    target: Mapping[str, Any],
    bias: bool = True,
    qkv_bias: bool = False,
    num_layers: int = 1,
    seed: int = 0,
    file: str = "pt",
    dtype: str = "float32",
    embedding: np.ndarray | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """Write an EAGLE-1/2 head for a target of configuration `target` and return the folder.

    `embedding` (vocab_size, hidden_size) is the checkpoint's copy of the target's (random by default). The key `bias`
    is written only when it is false, because absent means true. `changes` override config.json.
    """
    source, hidden_size = Source(seed), int(target["hidden_size"])
    tensors: Tensors = {
        "embed_tokens.weight": source.table(target["vocab_size"], hidden_size) if embedding is None else embedding,
        "fc.weight": source.matrix(hidden_size, 2 * hidden_size),
    }
    if bias:
        tensors["fc.bias"] = source.vector(hidden_size)
    for layer in range(num_layers):
        prefix = f"layers.{layer}."
        tensors |= _decoder_layer(source, prefix, target, hidden_size, qkv_bias)
        if layer:
            tensors[prefix + "input_layernorm.weight"] = source.scale(hidden_size)
    config = _llama_config(target) | {"num_hidden_layers": num_layers}
    config |= ({} if bias else {"bias": False}) | ({"qkv_bias": True} if qkv_bias else {}) | dict(changes or {})
    return _write(folder, tensors, config, MODEL_FILES[file], dtype)


def write_eagle3(
    folder: Path,
    target: Mapping[str, Any],
    draft_vocab_size: int,
    hidden_size: int | None = None,
    layer_prefix: str = "midlayer.",
    seed: int = 0,
    file: str = "pt",
    dtype: str = "float32",
    embedding: np.ndarray | None = None,
    norms: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """Write an EAGLE-3 head for a target of configuration `target` and return the folder.

    A `hidden_size` other than the target's gives the layout with `target_hidden_size` and an embedding of its own;
    otherwise `embed_tokens.weight` is written only when `embedding` is given. With a draft vocabulary as large as the
    target's there is no map. `norms` are the keys of EAGLE-3.1, with their tensors. `changes` override config.json; a
    `head_dim` among them also shapes the attention.
    """
    source, width = Source(seed), int(hidden_size or target["hidden_size"])
    own = dict(target) | {"hidden_size": width} | dict(changes or {})
    tensors: Tensors = {
        "fc.weight": source.matrix(width, 3 * target["hidden_size"]),
        "norm.weight": source.scale(width),
        "lm_head.weight": source.table(draft_vocab_size, width),
    }
    tensors |= _decoder_layer(source, layer_prefix, own, 2 * width, False)
    for name in ("input_layernorm", "hidden_norm"):
        tensors[f"{layer_prefix}{name}.weight"] = source.scale(width)
    if width != target["hidden_size"] and embedding is None:
        embedding = source.table(target["vocab_size"], width)
    if embedding is not None:
        tensors["embed_tokens.weight"] = embedding
    if "fc_norm" in norms:
        tensors |= {f"fc_norm.{i}.weight": source.scale(target["hidden_size"]) for i in range(3)}
    if "norm_before_fc" in norms:
        tensors["input_norm.weight"] = source.scale(3 * target["hidden_size"])
    if draft_vocab_size < target["vocab_size"]:
        tensors |= _vocabulary_map(source, target["vocab_size"], draft_vocab_size)
    config = _llama_config(own) | {"num_hidden_layers": 1, "draft_vocab_size": draft_vocab_size}
    config |= dict.fromkeys(norms, True)
    if width != target["hidden_size"]:
        config["target_hidden_size"] = target["hidden_size"]
    return _write(folder, tensors, config | dict(changes or {}), MODEL_FILES[file], dtype)


def write_redrafter(
    folder: Path,
    hidden_size: int,
    vocab_size: int,
    num_layers: int = 1,
    exit_dim: int | None = None,
    rnn: bool = True,
    seed: int = 0,
    file: str = "safetensors",
    dtype: str = "float32",
) -> Path:
    """Write a recurrent drafter and return the folder; it has an input projection unless exit_dim = 2 hidden_size."""
    source, width = Source(seed), exit_dim or 2 * hidden_size
    tensors: Tensors = {}
    if width != 2 * hidden_size:
        tensors |= {"input_proj.weight": source.matrix(width, 2 * hidden_size), "input_proj.bias": source.vector(width)}
    for layer in range(num_layers):
        tensors[f"lm_head.{layer}.linear.weight"] = source.matrix(width, width)
        tensors[f"lm_head.{layer}.linear.bias"] = source.vector(width)
    tensors[f"lm_head.{num_layers}.weight"] = source.matrix(vocab_size, width) * 3.0
    if rnn:
        tensors |= {"rnn_u.weight": source.matrix(hidden_size, hidden_size), "rnn_u.bias": source.vector(hidden_size)}
        tensors["rnn_w.weight"] = source.matrix(hidden_size, hidden_size)
    config = {
        "architectures": ["Drafter"],
        "exit_dim": width,
        "hidden_size": hidden_size,
        "model_type": "recurrent_drafting_drafter",
        "num_draft_layers": num_layers,
        "num_lookback_tokens": -1,
        "rnn": rnn,
        "torch_dtype": dtype,
        "vocab_size": vocab_size,
    }
    return _write(folder, tensors, config, MODEL_FILES[file], dtype)


def _decoder_layer(source: Source, prefix: str, config: Mapping[str, Any], in_size: int, qkv_bias: bool) -> Tensors:
    """Return attention (reading in_size), MLP and the norm between them of one decoder layer, named as in Llama."""
    hidden_size, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or hidden_size // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    tensors: Tensors = {}
    for name, out_size in (("q", heads * head_dim), ("k", kv_heads * head_dim), ("v", kv_heads * head_dim)):
        tensors[f"{prefix}self_attn.{name}_proj.weight"] = source.matrix(out_size, in_size)
        if qkv_bias:
            tensors[f"{prefix}self_attn.{name}_proj.bias"] = source.vector(out_size)
    tensors[f"{prefix}self_attn.o_proj.weight"] = source.matrix(hidden_size, heads * head_dim)
    for name in ("gate", "up"):
        tensors[f"{prefix}mlp.{name}_proj.weight"] = source.matrix(config["intermediate_size"], hidden_size)
    tensors[f"{prefix}mlp.down_proj.weight"] = source.matrix(hidden_size, config["intermediate_size"])
    tensors[f"{prefix}post_attention_layernorm.weight"] = source.scale(hidden_size)
    return tensors


def _vocabulary_map(source: Source, vocab_size: int, draft_vocab_size: int) -> Tensors:
    """Return d2t (offsets, int64) and t2d (bool over the target's vocabulary) of a random choice of tokens."""
    kept = np.sort(source.numbers.choice(vocab_size, draft_vocab_size, replace=False)).astype(np.int64)
    return {"d2t": kept - np.arange(draft_vocab_size), "t2d": np.isin(np.arange(vocab_size), kept)}


def _llama_config(target: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Llama keys that EAGLE's authors write, with the sizes of `target`."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": target["hidden_size"],
        "initializer_range": 0.02,
        "model_type": "llama",
        "pad_token_id": 0,
        "rms_norm_eps": target.get("rms_norm_eps", 1e-6),
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.28.1",
        "use_cache": True,
    }
    return config | {key: target[key] for key in COPIED if key in target}


def _write(folder: Path, tensors: Tensors, config: Mapping[str, Any], file: str, dtype: str) -> Path:
    """Write config.json and `file`; floating-point tensors become `dtype`, integers and bools stay."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
    state = {name: torch.from_numpy(np.array(value)) for name, value in tensors.items()}
    state = {k: v.to(getattr(torch, dtype)) if v.is_floating_point() else v for k, v in state.items()}
    if file.endswith(".safetensors"):
        save_file(state, folder / file, metadata={"format": "pt"})
    else:
        torch.save(state, folder / file)
    return folder
