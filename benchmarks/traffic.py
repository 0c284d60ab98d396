"""Held-out prompts, by task, mixed, or cut to a length."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.deployment import ROOT
from orchestrator.core.deployment.checkpoint import read_checkpoint
from orchestrator.core.errors import ConfigError
from runtime.models.stock import read_pretrained

PROMPTS = ROOT / "tests/data/prompts"
#: Questions in Spec-Bench's layout; its eight categories of MT-Bench are one.
QUESTIONS = ROOT / "benchmarks/questions/questions.jsonl"
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


@dataclass(frozen=True)
class Prompt:
    """A held-out text to continue."""

    id: str
    task: str
    text: str

    @property
    def prediction(self) -> str:
        """The rest of an edit as an unchanged copy; "" for other prompts."""
        original, announced, copy = self.text.partition("\n\n\n# the same with ")
        return "\n" + "\n".join(original.split("\n")[copy.count("\n") :]) if announced else ""


def read_prompts() -> dict[str, list[Prompt]]:
    """Return all prompts by task, in the order of their files."""
    lines = [line for file in sorted(PROMPTS.glob("*.jsonl")) for line in file.read_text().splitlines()]
    tasks: dict[str, list[Prompt]] = {}
    for entry in map(json.loads, lines):
        tasks.setdefault(entry["task"], []).append(Prompt(entry["id"], entry["task"], entry["text"]))
    return tasks


def read_questions(file: Path, target: str) -> dict[str, list[Prompt]]:
    """Return the first turn of each question by category, as a chat in the target's template if it has one.

    file: JSON lines with question_id, category and turns. Raises ConfigError for a file that is not such.
    """
    tokenizer = read_pretrained(AutoTokenizer, target)
    found: dict[str, list[Prompt]] = {}
    try:
        for entry in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            category = "mt_bench" if entry["category"] in MT_BENCH else str(entry["category"])
            chat = [{"role": "user", "content": entry["turns"][0]}]
            has_template = bool(tokenizer.chat_template)
            text = _chat_text(tokenizer, chat) if has_template else entry["turns"][0]
            found.setdefault(category, []).append(Prompt(str(entry["question_id"]), category, text))
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        wrong = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{file}: not JSON lines of question_id, category and turns: {wrong} (--prompts)") from None
    return found


def _chat_text(tokenizer: Any, chat: Sequence[Mapping[str, str]]) -> str:
    text: str = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return text


def prompts_of_length(
    target: str, held_out: Mapping[str, Sequence[Prompt]], task: str, num_tokens: int, count: int
) -> list[Prompt]:
    """Return up to `count` prompts of `num_tokens` tokens each, cut from the held-out prompts one after the other."""
    tokenizer = read_checkpoint(target).tokenizer
    ids = tokenizer.encode("\n".join(prompt.text for some in held_out.values() for prompt in some)).ids
    starts = range(0, len(ids) - num_tokens, num_tokens)[:count]
    return [Prompt(f"{task}-{i}", task, tokenizer.decode(ids[at : at + num_tokens])) for i, at in enumerate(starts)]


def mixed_prompts(count: int) -> list[Prompt]:
    """Return `count` prompts, the tasks in turn."""
    tasks = read_prompts()
    most = max(len(some) for some in tasks.values())
    turns = [some[i] for i in range(most) for some in tasks.values() if i < len(some)]
    return turns[:count]
