"""Makes new heads of the target's sizes, with seeded parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig

from build.data import Tokens
from build.errors import BuildError
from build.heads.settings import ABLATED, Settings
from build.heads.target import FrozenTarget
from runtime.models.heads.modules.eagle import Eagle3Head, EagleHead
from runtime.models.heads.modules.medusa import MedusaHeads
from runtime.models.heads.modules.redrafter import RedrafterHead


def make_heads(target: FrozenTarget, settings: Settings, stream: Tokens) -> nn.ModuleDict:
    """Return the modules by name. stream: (n,), the training text, from which EAGLE-3's draft vocabulary is taken."""
    heads = nn.ModuleDict()
    for name in settings.names:
        torch.manual_seed(settings.seed)  # a head starts with the same numbers whatever is trained beside it
        heads[name] = _make(name, target, settings, stream)
    for parameter in heads.parameters():
        parameter.data = parameter.data.to(target.device, torch.float32)  # the target's tables keep their type
    return heads.train()


def _make(name: str, target: FrozenTarget, settings: Settings, stream: Tokens) -> nn.Module:
    sizes, embedding, lm_head = settings.sizes, target.embedding, target.lm_head
    if name == "medusa":
        return MedusaHeads(sizes.medusa_heads, sizes.medusa_layers, lm_head)
    if name == "redrafter":
        return RedrafterHead(embedding, sizes.redrafter_layers, sizes.exit_dim or 2 * embedding.shape[1])
    config = _layer_config(target.config)
    if name in ("eagle", ABLATED):
        return EagleHead(config, embedding, lm_head, reads_token=name != ABLATED)
    ids = frequent_tokens(stream, sizes.draft_vocab, len(lm_head))
    head = Eagle3Head(config, embedding, len(ids))
    head.get_buffer("d2t").copy_(ids - torch.arange(len(ids)))
    head.lm_head.weight.data.copy_(lm_head[ids.to(lm_head.device)])
    return head


def frequent_tokens(stream: Tokens, count: int, vocab_size: int) -> Tensor:
    """Return the most frequent tokens of the stream, ascending, (count,) int64; ties go to the lower ids."""
    if not 0 < count <= vocab_size:
        raise BuildError(f"the draft vocabulary must be in 1..{vocab_size}, got {count} (--draft-vocab)")
    counts = np.bincount(stream, minlength=vocab_size)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:count]).astype(np.int64))


def _layer_config(target: PretrainedConfig) -> LlamaConfig:
    """Return the config of a Llama layer of the target's sizes, with defaults for keys that its family lacks."""
    values: dict[str, Any] = {
        "intermediate_size": 4 * target.hidden_size,
        "num_key_value_heads": target.num_attention_heads,
        "head_dim": target.hidden_size // target.num_attention_heads,
        "rms_norm_eps": 1e-6,
    }
    copied = (*values, "hidden_size", "num_attention_heads", "max_position_embeddings", "rope_parameters", "vocab_size")
    values |= {key: value for key in copied if (value := getattr(target, key, None)) is not None}
    return LlamaConfig(**values, num_hidden_layers=1, tie_word_embeddings=False)
