"""Prompts with task, category and turns, from JSON lines in our own, Spec-Bench's or SPEED-Bench's layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.samples import BenchError
from benchmarks.traffic import read_prompts
from orchestrator.core.errors import abbreviated

#: Spec-Bench's first eight categories are those of MT-bench; the others are tasks of their own.
MT_BENCH = frozenset(("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"))
#: SPEED-Bench as downloaded has this instead of texts that belong to others; its own script fills them in.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"
LAYOUTS = "a line has `turns` (a list of texts, or of messages with `content`) or `text`, and `category` or `task`"


@dataclass(frozen=True)
class Conversation:
    """What a user says, one turn after the other; the target answers in between."""

    id: str
    task: str
    category: str
    turns: tuple[str, ...]


def held_out(tasks: Sequence[str], count: int) -> list[Conversation]:
    """Return the first `count` held-out prompts of each task, of one turn each; raises BenchError for another task."""
    known = read_prompts()
    if unknown := [task for task in tasks if task not in known]:
        raise BenchError(f"unknown task {unknown[0]!r}; the held-out prompts have {', '.join(known)} (--tasks)")
    return [Conversation(p.id, task, task, (p.text,)) for task in tasks for p in known[task][:count]]


def read_conversations(file: Path, count: int) -> list[Conversation]:
    """Return the first `count` conversations of each category; raises BenchError naming file and line."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{file} cannot be read as UTF-8 text: {error} (--prompts)") from None
    found: list[Conversation] = []
    kept: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            conversation = _conversation(json.loads(line), f"{file.stem}-{number}")
        except (ValueError, RecursionError) as error:
            raise BenchError(f"{file}, line {number}: {error}; {LAYOUTS} (--prompts)") from None
        kept[conversation.category] = kept.get(conversation.category, 0) + 1
        if kept[conversation.category] <= count:
            found.append(conversation)
    if not found:
        raise BenchError(f"{file} holds no prompts (--prompts)")
    if len({each.id for each in found}) < len(found):
        raise BenchError(f"{file} has two prompts with one id (--prompts)")
    return found


def _conversation(entry: Any, number: str) -> Conversation:
    if not isinstance(entry, dict):
        raise ValueError(f"expected an object, got {abbreviated(entry)}")
    turns = _turns(entry["turns"] if "turns" in entry else [entry.get("text")])
    category = str(entry.get("category") or entry.get("task") or "all")
    task = str(entry.get("task") or ("mt_bench" if category in MT_BENCH else category))
    identity = next((entry[key] for key in ("id", "question_id") if entry.get(key) is not None), number)
    return Conversation(str(identity), task, category, turns)


def _turns(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not values:
        raise ValueError(f"turns must be a list of texts, got {abbreviated(values)}")
    texts: list[Any] = [value.get("content") if isinstance(value, dict) else value for value in values]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError(f"a turn must be a text, got {abbreviated(values)}")
    if any(PLACEHOLDER in text for text in texts):
        raise ValueError("the text is a placeholder: fill SPEED-Bench with its own script first")
    return tuple(texts)


class Writer:
    """Writes a conversation as the prompt for its next answer, in the target's chat template or, without one, as text.

    tokenizer: of transformers, or None for no template.
    """

    def __init__(self, tokenizer: Any = None) -> None:
        self._tokenizer = tokenizer if getattr(tokenizer, "chat_template", None) else None

    @property
    def has_template(self) -> bool:
        """True if prompts are written in a chat template."""
        return self._tokenizer is not None

    def prompt(self, turns: Sequence[str], answers: Sequence[str]) -> str:
        """Return the prompt after the answers to all turns but the last."""
        if self._tokenizer is None:
            return "".join(f"{turn}{answer}\n\n" for turn, answer in zip(turns, answers, strict=False)) + turns[-1]
        messages = []
        for place, turn in enumerate(turns):
            messages.append({"role": "user", "content": turn})
            if place < len(answers):
                messages.append({"role": "assistant", "content": answers[place]})
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text
