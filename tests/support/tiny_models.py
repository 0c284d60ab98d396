"""Tiny random checkpoints in Hugging Face format, made in a second; their text is meaningless."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB_SIZE = 64

TINY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "initializer_range": 0.6,
}


def tiny_config(family: str = "llama", **changes: Any) -> Any:
    """Return the transformers configuration of a tiny model of `family`."""
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **{**TINY, **changes})


def make_tiny_target(
    folder: Path, family: str = "llama", seed: int = 0, dtype: str = "float32", **changes: Any
) -> Path:
    """Write a random causal language model of `family` to `folder` (safetensors) and return the folder."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    write_byte_tokenizer(folder)
    return folder


def make_like(source: Path, folder: Path, share: float) -> None:
    """Write a checkpoint whose weights are this share off: a drafter that is often right, and often wrong."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source)
    torch.manual_seed(5)
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(1 + share * torch.randn_like(weights))
    model.save_pretrained(folder)


def write_byte_tokenizer(folder: Path) -> None:
    """Write a tokenizer.json whose ids 1… are single characters, so that text requests work too."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    characters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    vocab = {"<|endoftext|>": 0} | {c: i for i, c in enumerate(characters, start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
