"""The text of a line of JSON, as the target reads it; it opens no files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from build.errors import BuildError
from orchestrator.core.errors import first_line

#: Keys of a JSON line that hold text or lists of texts, and keys that hold the turns of a chat.
TEXT_KEYS = ("text", "content", "value", "prompt", "completion", "instruction", "input", "output", "response")
TURN_KEYS = ("messages", "conversations")
SPLIT_KEYS = ("prompt", "completion")
#: Speakers under `from`, and their roles in chat templates.
ROLES = {"human": "user"} | dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant")

Turn = dict[str, Any]


class ParsedText(NamedTuple):
    """The text of a document, or "". source: what identifies the document, its text or what it was made from."""

    text: str
    source: str


class ChatTemplate:
    """Writes chats in the target's own template, and counts them.

    added: the token that the tokenizer itself puts in front; it is removed from the template's text.
    """

    def __init__(self, tokenizer: Any, added: str) -> None:
        self.num_chats = 0
        self._tokenizer = tokenizer
        self._added = added

    def write(self, turns: list[Turn]) -> str:
        """Return the chat as text; raises BuildError with the template's reason."""
        self.num_chats += 1
        try:
            written: str = self._tokenizer.apply_chat_template(turns, tokenize=False)
        except Exception as error:  # a template is a program and may raise anything
            raise BuildError(f"is a chat that the target's template refuses: {first_line(error)}") from None
        return written.removeprefix(self._added)

    def source(self, line: str) -> str:
        """Return what identifies a chat: not its text, since some templates write the date."""
        return f"{self._tokenizer.chat_template}\n{line}"


def parse_lines(file: Path, lines: Iterable[str], template: ChatTemplate | None) -> Iterator[ParsedText]:
    """Yield the document of each line that is not blank; raises BuildError naming the file and the line."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield _parse_line(line, template)
            except BuildError as error:
                raise BuildError(f"{file}, line {number} {error}") from None


def _parse_line(line: str, template: ChatTemplate | None) -> ParsedText:
    """Return the text of a line of JSON; a chat is written in the template. Raises BuildError for other values."""
    try:
        value = json.loads(line)
        text = _text_of(value)
        (text or "").encode()  # half of a surrogate pair is JSON, but not text
    except (ValueError, RecursionError) as error:
        raise BuildError(f"cannot be read as JSON: {first_line(error)}") from None
    if text is None:
        raise BuildError(f"has no text under {', '.join((*TEXT_KEYS, *TURN_KEYS))}")
    if not text.strip():
        return ParsedText("", "")
    turns = _turns_of(value) if template else []
    return ParsedText(template.write(turns), template.source(line)) if template and turns else ParsedText(text, text)


def _text_of(value: Any) -> str | None:
    """Return the text of a JSON value: the value itself, or the values of the known keys in their order, a line each.

    Returns "" if a known key is empty, and None if there is no known key.
    """
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, dict):
        value = [value[key] for key in (*TEXT_KEYS, *TURN_KEYS) if key in value] or None
    elif value == []:
        return ""
    found = [_text_of(part) for part in value] if isinstance(value, list) else []
    parts = [part for part in found if part is not None]
    return "\n".join(part for part in parts if part) if parts else None


def _turns_of(value: Any) -> list[Turn]:
    """Return the turns of a chat, each with a role and content; empty if the value is not a chat.

    A chat is a list of turns, by itself or under a key; it may also be split into `prompt` and `completion`.
    """
    if isinstance(value, dict):
        parts = [value[key] for key in TURN_KEYS if value.get(key)][:1] or [value.get(key) for key in SPLIT_KEYS]
        value = [*chain(*parts)] if all(isinstance(part, list) for part in parts) else []
    is_chat = isinstance(value, list) and all(isinstance(turn, dict) and _speaker(turn) for turn in value)
    if not is_chat:
        return []
    return [
        {
            **turn,
            "role": ROLES.get(_speaker(turn), _speaker(turn)),
            "content": _text_of(turn.get("content", turn.get("value"))) or "",
        }
        for turn in value
    ]


def _speaker(turn: Turn) -> str:
    return str(turn.get("role") or turn.get("from") or "")
