"""The heads' corpus: lines of JSON, chats in the target's template, tokens as the server encodes a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from build.corpus import Document
from build.data import encode_documents
from build.errors import BuildError
from build.heads.model_card import head_card
from build.heads.publish import heads_corpus
from build.heads.text import HeadsText, heads_text, read_corpus, target_tokenizer
from build.workspace import MODELS, Workspace
from tests.support.tiny_models import tiny_config, write_byte_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for turn in messages %}"
    "{% if turn.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('who is ' + turn.role) }}{% endif %}"
    "{{ turn.role[0] }}Q{{ turn.content }}X{% endfor %}"
)
CHAT = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "answer"}]


def make_target(folder: Path, template: str = "", bos: bool = False) -> Path:
    """Write what a corpus needs of a target: the sizes and the tokenizer, whose characters are tokens of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_config().save_pretrained(folder)
    write_byte_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>"])
    if bos:
        pair = ("<s>", tokenizer.token_to_id("<s>"))
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[pair])
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|endoftext|>"}
    told |= {"chat_template": template} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder


def write_lines(file: Path, *lines: Any) -> Path:
    file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return file


def texts_of(file: Path) -> list[str]:
    return [document.text for document in read_corpus(file).documents]


def text_of(target: Path, corpus: Path, scratch: Path) -> HeadsText:
    return heads_text(str(target), str(corpus), Workspace(scratch), scratch)


def documents_in(text: HeadsText, target: Path) -> set[str]:
    """Return what stands between the ends of documents, special tokens spelt out."""
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    whole = "".join(str(tokenizer.id_to_token(int(token))) for token in [*text.train, *text.held_out])
    return {part for part in whole.split("<|endoftext|>") if part}


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85", "\x1c"])
def test_lines_end_at_newlines_alone(tmp_path: Path, character: str) -> None:
    lines = [{"text": f"one{character}two"}, {"text": "three"}]
    assert texts_of(write_lines(tmp_path / "some.jsonl", *lines)) == [f"one{character}two", "three"]


@pytest.mark.parametrize(
    "line",
    ["[" * 100_000 + "]" * 100_000, '{"text": ' + "[" * 900 + '"x"' + "]" * 900 + "}", '{"text": "\\ud800"}', "{"],
    ids=["deep", "deep text", "half a surrogate", "broken"],
)
def test_line_that_cannot_be_read_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "some.jsonl").write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(BuildError, match=r"some\.jsonl, line 2 cannot be read as JSON: \S") as error:
        read_corpus(tmp_path / "some.jsonl")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("line", [{"id": 3}, {"text": 3}, {"messages": [{"role": "user"}]}, 7, {}])
def test_line_of_another_kind_is_refused_not_skipped(tmp_path: Path, line: Any) -> None:
    with pytest.raises(BuildError, match=r"line 2 has no text under text, .*conversations"):
        read_corpus(write_lines(tmp_path / "some.jsonl", {"text": "fine"}, line))


# Chats


SHARED_GPT = [{"from": "system", "value": "be"}, {"from": "human", "value": "ask"}, {"from": "gpt", "value": "say"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]}]


@pytest.mark.parametrize("bos", [False, True])
def test_chats_are_written_with_the_target_s_template(tmp_path: Path, bos: bool) -> None:
    """Whether or not the tokenizer puts the `<s>` in front that the template writes, there is one."""
    target = make_target(tmp_path / "model", TEMPLATE, bos)
    lines: list[Any] = [{"messages": CHAT}] * 60 + [{"conversations": SHARED_GPT}, {"messages": PARTS}] * 30
    text = text_of(target, write_lines(tmp_path / "chats.jsonl", *lines), tmp_path)
    expected = {"<s>uQaskXaQanswerX", "<s>sQbeXuQaskXaQsayX", "<s>uQaĊbX"}
    assert documents_in(text, target) == {part.replace("Ċ", "") for part in expected}
    assert len(text.held_out) > 10
    assert text.chat_template


def test_chat_that_the_template_refuses_is_named(tmp_path: Path) -> None:
    target = make_target(tmp_path / "model", TEMPLATE)
    lines = [{"messages": CHAT}] * 3 + [{"messages": [{"role": "critic", "content": "no"}]}]
    with pytest.raises(BuildError, match=r"line 4 is a chat that the target's template refuses: who is critic"):
        text_of(target, write_lines(tmp_path / "chats.jsonl", *lines), tmp_path)


def test_corpus_is_another_one_in_another_template_or_other_roles(tmp_path: Path) -> None:
    swapped = [{**turn, "role": "system"} for turn in CHAT]
    corpus = write_lines(tmp_path / "chats.jsonl", *[{"messages": CHAT}] * 60)
    names = {
        text_of(make_target(tmp_path / "model", template), corpus, tmp_path).corpus.sha256
        for template in ("", TEMPLATE, TEMPLATE + "!")
    }
    write_lines(tmp_path / "chats.jsonl", *[{"messages": swapped}] * 60)
    names.add(text_of(tmp_path / "model", corpus, tmp_path).corpus.sha256)
    assert len(names) == 4


# Tokens


def test_documents_are_encoded_as_the_server_encodes_a_prompt(tmp_path: Path) -> None:
    """The same words in the same folder, before and after the tokenizer puts `<s>` in front: no stale stream."""
    corpus = write_lines(tmp_path / "texts.jsonl", *[{"text": "plain"}] * 60)
    for bos in (False, True):
        target = make_target(tmp_path / "model", bos=bos)
        served = Tokenizer.from_file(str(target / "tokenizer.json")).encode("plain").ids
        text = text_of(target, corpus, tmp_path)
        assert text.train[: len(served) + 2].tolist() == [0, *served, 0]
        assert text.held_out[: len(served) + 2].tolist() == [0, *served, 0]


def test_demo_heads_see_the_tokens_they_always_saw() -> None:
    """Its tokenizer adds none of its own and has no template: the stream is that of plain words."""
    found = target_tokenizer(str(MODELS / "target"))
    plain = AutoTokenizer.from_pretrained(MODELS / "target").backend_tokenizer
    files = sorted(Path(json.__file__).parent.glob("*.py"))
    documents = tuple(Document(file.name, file.read_text(), "") for file in files)
    words = [plain.encode(document.text, add_special_tokens=False).ids for document in documents]
    expected = [found.end_id] + [token for ids in words for token in [*ids, found.end_id]]
    assert encode_documents(found.tokenizer, documents, found.end_id).tolist() == expected
    assert found.template is None
    assert found.special_tokens == ()


@pytest.mark.parametrize("template", ["", TEMPLATE])
def test_provenance_says_how_chats_were_written(tmp_path: Path, template: str) -> None:
    target = make_target(tmp_path / "model", template, bos=True)
    text = text_of(target, write_lines(tmp_path / "chats.jsonl", *[{"messages": CHAT}] * 60), tmp_path)
    corpus = heads_corpus(text)
    assert corpus["chat_template"] == bool(template)
    assert corpus["special_tokens"] == ["<s>"]
    provenance = json.loads((MODELS / "medusa" / "provenance.json").read_text()) | {"corpus": corpus}
    assert f"chat template: {'yes' if template else 'no'}; put in front: `<s>`" in head_card(provenance)
