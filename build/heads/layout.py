"""Heads in their authors' layout: file, tensors, config (docs/heads-formats.md); it writes no files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from build.heads.settings import ABLATED, Settings
from build.heads.target import FrozenTarget
from runtime.models.heads.checkpoint.checks import FINGERPRINT

LLAMA_KEYS = (
    "attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_parameters",
    "tie_word_embeddings", "vocab_size",
)  # fmt: skip


class Layout(NamedTuple):
    """What a head's folder holds besides the model card and provenance.json."""

    file: str
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]


def layout_of(name: str, head: nn.Module, target: FrozenTarget, settings: Settings) -> Layout:
    """Return the published form of the module `name`, in bfloat16, without tables borrowed from the target."""
    tensors = {key: _published(tensor) for key, tensor in head.state_dict().items()}
    if name == "eagle3":
        tensors["fc.weight"] = tensors["fc.weight"] / target.layer_scale  # training scales these states
        tensors["t2d"] = torch.zeros(len(target.lm_head), dtype=torch.bool)
        tensors["t2d"][head.get_buffer("d2t").cpu() + torch.arange(len(head.get_buffer("d2t")))] = True
    config = _config(name, head, target, settings) | {"torch_dtype": "bfloat16", FINGERPRINT: target.identity}
    return Layout("medusa_lm_head.safetensors" if name == "medusa" else "model.safetensors", tensors, config)


def _published(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    return (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).contiguous()


def _config(name: str, head: nn.Module, target: FrozenTarget, settings: Settings) -> dict[str, Any]:
    sizes, (vocab_size, hidden_size) = settings.sizes, target.lm_head.shape
    if name == "medusa":
        return {
            "base_model_name_or_path": target.title,
            "medusa_num_heads": sizes.medusa_heads,
            "medusa_num_layers": sizes.medusa_layers,
            "hidden_size": hidden_size,
            "vocab_size": vocab_size,
        }
    if name == "redrafter":
        return {
            "architectures": ["Drafter"],
            "model_type": "recurrent_drafting_drafter",
            "exit_dim": sizes.exit_dim or 2 * hidden_size,
            "hidden_size": hidden_size,
            "num_draft_layers": sizes.redrafter_layers,
            "num_lookback_tokens": -1,
            "rnn": True,
            "vocab_size": vocab_size,
        }
    config: LlamaConfig = head.config  # type: ignore[assignment]
    keys = {key: value for key in LLAMA_KEYS if (value := getattr(config, key, None)) is not None}
    keys |= {"model_type": "llama"}
    if name == "eagle3":
        draft_vocab_size = len(head.get_buffer("d2t"))
        return keys | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": draft_vocab_size}
    keys |= {"architectures": ["LlamaForCausalLM"], "bias": True}
    return keys | ({"reads_token": False} if name == ABLATED else {})
