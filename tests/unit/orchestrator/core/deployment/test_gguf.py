"""Tokenizer, template and numbers of GGUF files: those of the original; what is not supported is refused in words."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGUFWriter
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from orchestrator.core.deployment.checkpoint import read_checkpoint
from orchestrator.core.deployment.gguf_checkpoint import checkpoint_folder
from orchestrator.core.errors import ConfigError
from tests.support.gguf_files import finish, write_tokenizer

pytestmark = pytest.mark.unit

TEXTS = [
    json.loads(line)["text"]
    for name in ("completion", "edit", "docstring")
    for line in (Path(__file__).parents[4] / f"data/prompts/{name}.jsonl").read_text().splitlines()
]
TEMPLATE = "{% for message in messages %}<s>{{ message['content'] }}{% endfor %}"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def byte_level(cut: list[pre_tokenizers.PreTokenizer], use_regex: bool, ignore_merges: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cut, pre_tokenizers.ByteLevel(False, use_regex=use_regex)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<s>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


def words(numbers: str) -> list[pre_tokenizers.PreTokenizer]:
    """The expression of Llama 3 and Qwen 2, which differ in how many digits are one word."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + numbers
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )  # fmt: skip
    return [pre_tokenizers.Split(Regex(pattern), "isolated")]


def llama_3() -> Tokenizer:
    tokenizer = byte_level(words(r"\p{N}{1,3}"), False, ignore_merges=True)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def qwen_2() -> Tokenizer:
    tokenizer = byte_level(words(r"\p{N}"), False)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def sentence_pieces() -> Tokenizer:
    """Llama 2's kind: spaces are ▁, unknown characters are bytes, and a text begins with a space and <s>."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(
        [text.replace(" ", " \n") for text in TEXTS],
        trainers.BpeTrainer(vocab_size=1200, special_tokens=special, show_progress=False, max_token_length=12),
    )
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = [entry for entry in document["added_tokens"] if entry["content"] == "<s>"]
    tokenizer = Tokenizer.from_str(json.dumps(document))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt-2": lambda: byte_level([], True),
    "smollm": lambda: byte_level([pre_tokenizers.Digits(individual_digits=True)], True),
    "llama-bpe": llama_3,
    "qwen2": qwen_2,
    "": sentence_pieces,
}


def write(folder: Path, tokenizer: Tokenizer, pre: str, **keys: str | int | float | bool) -> str:
    """Write a file with the numbers of a small Llama and no weights but the embedding's."""
    import numpy as np

    writer = GGUFWriter(folder / "model.gguf", str(keys.pop("architecture", "llama")))
    numbers = {"embedding_length": 64, "feed_forward_length": 96, "block_count": 2, "context_length": 512}
    numbers |= {"attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-5}
    write_tokenizer(writer, tokenizer, pre)
    for key, value in ({f"llama.{name}": number for name, number in numbers.items()} | keys).items():
        adds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        if key != "without":
            adds[type(value)](key, value)  # type: ignore[operator]
    writer.add_tensor("token_embd.weight", np.zeros((tokenizer.get_vocab_size() + 6, 64), np.float32))
    finish(writer)
    return str(folder / "model.gguf")


def random_texts(number: int) -> list[str]:
    """Texts of many scripts, digits, spaces, special tokens and words of the prompts."""
    draw = random.Random(1)
    ranges = [(32, 126), (0xA0, 0x24F), (0x370, 0x5FF), (0x900, 0x97F), (0x4E00, 0x4F00), (0x1F300, 0x1F640)]
    parts = [*"  \n\t\r1234567890", "\n\n", "'s", "<s>", "<|im_end|>", "<tool>", "é", "e\u0301"]

    def part() -> str:
        return draw.choice(
            [draw.choice(parts), chr(draw.randint(*draw.choice(ranges))), draw.choice(draw.choice(TEXTS).split())]
        )

    return ["".join(part() for _ in range(draw.randint(1, 30))) for _ in range(number)]


@pytest.mark.parametrize("pre", KINDS)
def test_gguf_tokenizer_gives_the_original_s_ids_and_texts(tmp_path: Path, pre: str) -> None:
    original = KINDS[pre]()
    file = write(tmp_path, original, pre, **{"tokenizer.chat_template": TEMPLATE})
    checkpoint = read_checkpoint(file)
    assert checkpoint.eos_ids == {0} and checkpoint.max_positions == 512
    assert checkpoint.vocab_size == original.get_vocab_size() + 6
    of_transformers = AutoTokenizer.from_pretrained(checkpoint_folder(file))
    for text in [*TEXTS, *random_texts(1000)]:
        ids = original.encode(text).ids
        assert checkpoint.encode(text) == ids == of_transformers(text).input_ids, text
        assert checkpoint.tokenizer.decode(ids) == original.decode(ids)
    rendered = of_transformers.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert rendered == "<s>a" and of_transformers.eos_token == "<s>"


def test_gguf_folder_is_written_once_and_anew_for_another_file(tmp_path: Path, cache: Path) -> None:
    tokenizer = KINDS["gpt-2"]()
    folder = checkpoint_folder(write(tmp_path, tokenizer, "gpt-2"))
    assert checkpoint_folder(str(tmp_path / "model.gguf")) == folder
    assert checkpoint_folder(write(tmp_path, tokenizer, "gpt-2", more="x")) != folder
    assert len(list((cache / "specserve/gguf").iterdir())) == 2


@pytest.mark.parametrize(
    ("pre", "keys", "message"),
    [
        ("gpt-2", {"architecture": "mamba"}, r"the architecture 'mamba' is not read from GGUF \(allowed: llama"),
        ("tekken", {}, r"the pre-tokenizer 'tekken' \(key tokenizer.ggml.pre\) is not supported"),
        ("gpt-2", {"tokenizer.ggml.model": "t5"}, "the tokenizer kind 't5'"),
        ("gpt-2", {"llama.expert_count": 8}, "a mixture of experts is not read from GGUF"),
        ("gpt-2", {"llama.rope.scaling.type": "yarn"}, "the rope scaling 'yarn'"),
        ("gpt-2", {"llama.rope.dimension_count": 8}, "a head of 16 numbers of which others"),
        ("gpt-2", {"llama.attention.head_count": 4.0}, "head_count must be of type int, got float"),
    ],
)
def test_gguf_that_is_not_supported_is_refused_with_what_to_serve_instead(
    tmp_path: Path, pre: str, keys: dict[str, str | int | float], message: str
) -> None:
    tokenizer = KINDS["gpt-2"]()
    with pytest.raises(ConfigError, match=message):
        read_checkpoint(write(tmp_path, tokenizer, pre, **keys))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\x03\x04" * 9, b"GGUF\x01\0\0\0" + b"\0" * 16, None])
def test_gguf_that_is_cut_or_something_else_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is None:
        whole = Path(write(tmp_path, KINDS["gpt-2"](), "gpt-2")).read_bytes()
        content = whole[:3000]
    (tmp_path / "broken.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.gguf: "):
        read_checkpoint(str(tmp_path / "broken.gguf"))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_checkpoint(str(tmp_path / "missing.gguf"))
