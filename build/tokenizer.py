"""The byte-level BPE tokenizer of all demo models."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from orchestrator.core.deployment.checkpoint import read_tokenizer

VOCAB_SIZE = 4_096
MAX_LENGTH = 2_048
END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train a tokenizer of 4,096 byte-level tokens; id 0 is the end of a document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # The special token comes first and so gets id 0; every byte is in the alphabet, so no text is unknown.
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the two files that `tokenizers` and `transformers` load; the last one, tokenizer.json, all at once."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    partial = folder / "tokenizer.json.partial"
    tokenizer.save(str(partial), pretty=False)
    partial.replace(folder / "tokenizer.json")


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer that `save_tokenizer` wrote."""
    return read_tokenizer(folder / "tokenizer.json")
