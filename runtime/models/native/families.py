"""Which transformers models the native forward pass computes, and where it finds their weights and constants."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from native.library import Shape

#: Families whose norms multiply by 1 + weight; of these, the ones with norms after attention and the MLP as well.
GEMMA = ("gemma", "gemma2", "gemma3_text")
SANDWICH_NORMS = ("gemma2", "gemma3_text")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", *GEMMA)
ROPES = ("default", "linear", "llama3")
SILU, GELU = ("silu", "swish"), ("gelu_pytorch_tanh",)
MAX_HEAD_DIM = 512


def head_dim_of(config: Any) -> int:
    """Return the size of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def kv_numbers(config: Any) -> int:
    """Return how many numbers a token's keys and values are. config: the text config of a transformers model."""
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return int(2 * config.num_hidden_layers * num_heads * head_dim_of(config))


def unsupported(model: Any) -> str:
    """Return what the native forward pass lacks for a stock transformers model, or "" if nothing."""
    config = model.config.get_text_config()
    if config.model_type not in FAMILIES:
        return f"the family {config.model_type!r} (it has {', '.join(FAMILIES)})"
    head_dim, activation, layer = head_dim_of(config), _activation(config), model.get_decoder().layers[0]
    unknown_ropes = sorted(rope_types(config) - set(ROPES))
    lacks = {
        f"{model.dtype} on {model.device}": model.dtype == torch.float64 or model.device.type != "cpu",
        f"the rope type {', '.join(unknown_ropes)!r}": bool(unknown_ropes),
        f"the activation {activation!r}": activation not in (*SILU, *GELU),
        f"heads of {head_dim} numbers": head_dim % 16 != 0 or head_dim > MAX_HEAD_DIM,
        f"a hidden size of {config.hidden_size}": config.hidden_size % 16 != 0,
        "attention in both directions": getattr(config, "use_bidirectional_attention", False) is True,
        "biases of o_proj": layer.self_attn.o_proj.bias is not None,
        "biases of the MLP": layer.mlp.down_proj.bias is not None,
    }
    return next((name for name, is_lacking in lacks.items() if is_lacking), "")


def rope_types(config: Any) -> set[str]:
    """Return the types of a model's rotations, one for each kind of layer. config: the text config."""
    ropes = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    by_layer = [rope for rope in ropes.values() if isinstance(rope, dict)] or [ropes]
    return {str(rope.get("rope_type", rope.get("type", "default"))) for rope in by_layer}


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def shape_of(model: Any, rounds_inputs: bool) -> Shape:
    """Return the sizes and constants of a supported model. rounds_inputs: the products are in bfloat16."""
    config, decoder = model.config.get_text_config(), model.get_decoder()
    frequencies = next(iter(rotations(model))).frequencies
    return Shape(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim_of(config),
        mlp_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        norm_eps=config.rms_norm_eps,
        score_scale=decoder.layers[0].self_attn.scaling,
        score_softcap=getattr(config, "attn_logit_softcapping", None) or 0.0,
        logit_softcap=getattr(config, "final_logit_softcapping", None) or 0.0,
        embedding_scale=getattr(model.get_input_embeddings(), "scalar_embed_scale", 0.0),
        is_gelu=_activation(config) in GELU,
        rotary_size=2 * len(frequencies),
        rounds_inputs=rounds_inputs,
    )


class Rotation:
    """The rotation of some layers: frequencies (rotated elements / 2,) float32, and the scale of its cosines."""

    def __init__(self, layers: list[int], frequencies: Tensor, scale: float) -> None:
        self.layers = layers
        self.frequencies = frequencies.float().contiguous()
        self.scale = scale


def rotations(model: Any) -> Iterator[Rotation]:
    """Yield the rotations of a model's layers."""
    config, rotary = model.config.get_text_config(), model.get_decoder().rotary_emb
    if hasattr(rotary, "inv_freq"):
        yield Rotation(list(range(config.num_hidden_layers)), rotary.inv_freq, float(rotary.attention_scaling))
        return
    for kind in sorted(set(config.layer_types)):  # Gemma 3 has one for each kind of layer
        layers = [index for index, own in enumerate(config.layer_types) if own == kind]
        scale = float(getattr(rotary, f"{kind}_attention_scaling"))
        yield Rotation(layers, getattr(rotary, f"{kind}_inv_freq"), scale)


def windows(config: Any) -> list[int]:
    """Return the sliding window of each layer; 0 = it sees all positions."""
    # Without kinds of layers in the configuration (Mistral, Phi-3), all layers slide if there is a window.
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None) or 0
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def norms_of(layer: Any, family: str) -> dict[str, Tensor]:
    """Return the norms of a decoder layer by their names in the native library."""
    attention = layer.self_attn
    norms = {"input_norm": layer.input_layernorm, "mlp_norm": layer.post_attention_layernorm}
    if family in SANDWICH_NORMS:
        norms |= {
            "post_attention_norm": layer.post_attention_layernorm,
            "mlp_norm": layer.pre_feedforward_layernorm,
            "post_mlp_norm": layer.post_feedforward_layernorm,
        }
    if hasattr(attention, "q_norm"):
        norms |= {"query_norm": attention.q_norm, "key_norm": attention.k_norm}
    return {name: norm_weight(norm, family) for name, norm in norms.items()}


def norm_weight(norm: Any, family: str) -> Tensor:
    """Return what a norm multiplies by, float32."""
    weight: Tensor = norm.weight.detach().float()
    return 1.0 + weight if family in GEMMA else weight
