"""Tokens as bytes and names: as transformers has them; a file's training settings change nothing."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gateway.tokenizer import Checkpoint, read_checkpoint

pytestmark = pytest.mark.unit


def write(folder: Path, **config: Any) -> Path:
    """Write a byte-level tokenizer with its config."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}} | config)
    )
    return folder


def read(folder: Path) -> Checkpoint:
    return read_checkpoint(str(folder), "", "name")


def test_a_text_is_encoded_as_a_whole_whatever_a_training_script_left_in_the_file(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    file = write(tmp_path) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.enable_truncation(max_length=64)
    tokenizer.enable_padding(length=300)
    tokenizer.save(str(file))
    ids = read(tmp_path).encode("a" * 164)
    assert len(ids) == 164 and ids == PreTrainedTokenizerFast(tokenizer_file=str(file))("a" * 164).input_ids


def test_tokens_have_the_bytes_of_the_text(tmp_path: Path) -> None:
    checkpoint = read(write(tmp_path))
    text = "a é 漢\n"
    assert b"".join(checkpoint.token_bytes(token) for token in checkpoint.encode(text)) == text.encode()
    assert {checkpoint.token_bytes(token) for token in range(256)} == {bytes([byte]) for byte in range(256)}
    assert checkpoint.decode(checkpoint.encode(text)) == text and checkpoint.name == "name"
    assert checkpoint.special_ids == {256, 257} and checkpoint.vocab_size == 258


def test_the_bytes_of_a_token_are_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    monkeypatch.setattr(Checkpoint, "_bytes_of", lambda _, token: found.append(token) or b"x")
    checkpoint = read(write(tmp_path))
    assert [checkpoint.token_bytes(token) for token in (1, 2, 1, 2)] == [b"x"] * 4 and found == [1, 2]


def test_the_size_of_the_vocabulary_is_asked_once(tmp_path: Path) -> None:
    """The tokenizer builds a table of all its tokens to count them."""
    asked = []

    class Counting:
        def get_vocab_size(self) -> int:
            asked.append(1)
            return 258

    checkpoint = replace(read(write(tmp_path)), tokenizer=Counting())
    assert [checkpoint.vocab_size for _ in range(9)] == [258] * 9 and len(asked) == 1


def test_tokens_of_sentencepiece_have_bytes_and_names_that_differ(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "<0xE6>": 1, "▁a": 2, "A": 3, "<0x41>": 4, " a": 5}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    checkpoint = read(tmp_path)

    assert [checkpoint.token_bytes(token) for token in range(1, 5)] == [b"\xe6", b" a", b"A", b"A"]
    names = ["bytes:\\xe6", " a", "A", "bytes:\\x41", "token_id:5", "token_id:634", "token_id:635"]
    assert checkpoint.token_names([1, 2, 3, 4, 5, 634, 635]) == names
