"""What a line of JSON says, as the text that the target is to read; it opens no files."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any, NamedTuple

from build.errors import BuildError
from orchestrator.core.errors import first_line

#: Keys of a JSON line that hold text, or lists of turns that do.
TEXT_KEYS = ("text", "content", "value", "prompt", "completion", "instruction", "input", "output", "response")
TURN_KEYS = ("messages", "conversations")
PARTED_KEYS = ("prompt", "completion")
#: Who speaks under `from`, in the words of the templates.
ROLES = {"human": "user"} | dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant")

Turn = dict[str, Any]


class Piece(NamedTuple):
    """A document's text, empty where there is none, and what tells it from others: the same, or what it came from."""

    text: str
    source: str


class ChatTemplate:
    """Writes chats as the target's own template does, and counts them.

    added: the token that the tokenizer puts in front by itself; a template that writes it would double it.
    """

    def __init__(self, tokenizer: Any, added: str) -> None:
        self.num_chats = 0
        self._tokenizer = tokenizer
        self._added = added

    def write(self, turns: list[Turn]) -> str:
        """The chat as text; raises BuildError with the template's reason."""
        self.num_chats += 1
        try:
            written: str = self._tokenizer.apply_chat_template(turns, tokenize=False)
        except Exception as error:  # a template is a program and fails as such
            raise BuildError(f"is a chat that the target's template refuses: {first_line(error)}") from None
        return written.removeprefix(self._added)

    def source(self, line: str) -> str:
        """What tells a chat from others; not the text itself, for some templates write the day."""
        return f"{self._tokenizer.chat_template}\n{line}"


def piece_of(line: str, template: ChatTemplate | None) -> Piece:
    """The text of a line of JSON, a chat's in the template where there is one; raises BuildError saying why not."""
    try:
        value = json.loads(line)
        text = text_of(value)
        (text or "").encode()  # half a surrogate is JSON, but no text
    except (ValueError, RecursionError) as error:
        raise BuildError(f"is no JSON that can be read: {first_line(error)}") from None
    if text is None:
        raise BuildError(f"has no text under {', '.join((*TEXT_KEYS, *TURN_KEYS))}")
    if not text.strip():
        return Piece("", "")
    turns = turns_of(value) if template else []
    return Piece(template.write(turns), template.source(line)) if template and turns else Piece(text, text)


def text_of(value: Any) -> str | None:
    """The text of a JSON value: itself, or what stands under the known keys, in their order, a line each.

    Returns "" where the place of a text is empty, None where there is no such place.
    """
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, dict):
        value = [value[key] for key in (*TEXT_KEYS, *TURN_KEYS) if key in value] or None
    elif value == []:
        return ""
    found = [text_of(part) for part in value] if isinstance(value, list) else []
    parts = [part for part in found if part is not None]
    return "\n".join(part for part in parts if part) if parts else None


def turns_of(value: Any) -> list[Turn]:
    """The turns of a chat, each with its role and its words; none where the value is no chat.

    A chat is a list of turns, or stands under a key; it may also be parted into `prompt` and `completion`.
    """
    if isinstance(value, dict):
        parts = [value[key] for key in TURN_KEYS if value.get(key)][:1] or [value.get(key) for key in PARTED_KEYS]
        value = [*chain(*parts)] if all(isinstance(part, list) for part in parts) else []
    is_chat = isinstance(value, list) and all(isinstance(turn, dict) and _speaker(turn) for turn in value)
    return [_turn(turn) for turn in value] if is_chat else []


def _turn(turn: Turn) -> Turn:
    role = _speaker(turn)
    return {**turn, "role": ROLES.get(role, role), "content": text_of(turn.get("content", turn.get("value"))) or ""}


def _speaker(turn: Turn) -> str:
    return str(turn.get("role") or turn.get("from") or "")
