"""Held-out prompts, by task, mixed, or cut to a length."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.deployment import ROOT
from orchestrator.core.deployment.checkpoint import read_checkpoint

PROMPTS = ROOT / "tests/data/prompts"


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
