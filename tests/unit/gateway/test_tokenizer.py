"""Tokens as bytes, chats as prompts: as transformers has them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gateway.errors import BadRequest
from gateway.settings import SettingsError
from gateway.tokenizer import Checkpoint, read_checkpoint

pytestmark = pytest.mark.unit

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": 'Say "é"\n'},
    {"role": "assistant", "content": "é"},
    {"role": "user", "content": "Again"},
]
TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "blocks": """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
[SYS]{{ message.content | trim }}[/SYS]
    {%- elif message.role == 'user' %}
        {{- '[INST]' ~ message.content | tojson ~ '[/INST]' }}
    {%- else %}
        {{- message.content + eos_token }}
    {%- endif %}
{%- endfor %}""",
    "loop": "{% for m in messages if m.role != 'system' %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
}


def write(folder: Path, **config: Any) -> Path:
    """Write a byte-level tokenizer with its config."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}} | config)
    )
    return folder


@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = write(tmp_path, chat_template=TEMPLATES[name])
    wanted = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>", chat_template=TEMPLATES[name]
    )
    checkpoint = read_checkpoint(str(folder), "", "")

    for adds in (True, False):
        text = wanted.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=adds)
        assert checkpoint.render_chat(CHAT, {"add_generation_prompt": adds}) == text
    ids = checkpoint.encode(checkpoint.render_chat(CHAT, {}), add_special_tokens=False)
    assert ids == wanted.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]


def test_a_template_may_come_from_a_file_or_be_one_of_several(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    folder = write(tmp_path, chat_template=several)
    assert read_checkpoint(str(folder), "", "").template == "yes"
    (folder / "chat_template.jinja").write_text("beside")
    assert read_checkpoint(str(folder), "", "").template == "beside"
    (tmp_path / "own").write_text("own")
    assert read_checkpoint(str(folder), str(tmp_path / "own"), "").template == "own"


def test_a_template_may_refuse_and_cannot_reach_out(tmp_path: Path) -> None:
    refusing = read_checkpoint(str(write(tmp_path, chat_template="{{ raise_exception('no system') }}")), "", "")
    with pytest.raises(BadRequest, match="no system"):
        refusing.render_chat(CHAT, {})
    escaping = read_checkpoint(str(write(tmp_path, chat_template="{{ ''.__class__.__mro__ }}")), "", "")
    with pytest.raises(BadRequest, match="unsafe"):
        escaping.render_chat(CHAT, {})


def test_a_broken_template_is_found_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="endfor"):
        read_checkpoint(str(write(tmp_path, chat_template="{% for x in y %}")), "", "")


def test_no_template_is_a_clear_refusal(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="--chat-template"):
        read_checkpoint(str(write(tmp_path)), "", "").render_chat(CHAT, {})


def test_tokens_have_the_bytes_of_the_text(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(str(write(tmp_path)), "", "name")
    text = "a é 漢\n"
    assert b"".join(checkpoint.token_bytes(token) for token in checkpoint.encode(text)) == text.encode()
    assert checkpoint.decode(checkpoint.encode(text)) == text and checkpoint.name == "name"
    assert checkpoint.special_ids == {256, 257} and checkpoint.vocab_size == 258


def test_the_bytes_of_a_token_are_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    monkeypatch.setattr(Checkpoint, "_bytes_of", lambda _, token: found.append(token) or b"x")
    checkpoint = read_checkpoint(str(write(tmp_path)), "", "name")
    assert [checkpoint.token_bytes(token) for token in (1, 2, 1, 2)] == [b"x"] * 4 and found == [1, 2]


def test_the_size_of_the_vocabulary_is_asked_once(tmp_path: Path) -> None:
    """The tokenizer builds a table of all its tokens to count them."""
    checkpoint = read_checkpoint(str(write(tmp_path)), "", "name")
    asked = []

    class Counting:
        def get_vocab_size(self) -> int:
            asked.append(1)
            return 258

    checkpoint = replace(checkpoint, tokenizer=Counting())
    assert [checkpoint.vocab_size for _ in range(9)] == [258] * 9 and len(asked) == 1


def test_byte_fallback_and_spaces_of_sentencepiece(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "<0xE6>": 1, "▁a": 2, "b": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    checkpoint = read_checkpoint(str(tmp_path), "", "")

    assert [checkpoint.token_bytes(token) for token in (1, 2, 3)] == [b"\xe6", b" a", b"b"]
