"""Held-out prompts, and requests to a running server by the shipped client."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.deployment import ROOT
from clients.demo import Prompt
from clients.generate import generate

PROMPTS = ROOT / "tests/data/prompts"


@dataclass(frozen=True)
class Answer:
    """The answer to a request; num_in_pass: mean number of requests in its passes of the target."""

    ids: list[int]
    num_steps: int
    num_drafted: int
    num_accepted: int
    num_in_pass: float


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
    tokenizer = Tokenizer.from_file(str(Path(target) / "tokenizer.json"))
    ids = tokenizer.encode("\n".join(prompt.text for some in held_out.values() for prompt in some)).ids
    starts = range(0, len(ids) - num_tokens, num_tokens)[:count]
    return [Prompt(f"{task}-{i}", task, tokenizer.decode(ids[at : at + num_tokens])) for i, at in enumerate(starts)]


def mixed_prompts(count: int) -> list[Prompt]:
    """Return `count` prompts, the tasks in turn."""
    tasks = read_prompts()
    most = max(len(some) for some in tasks.values())
    turns = [some[i] for i in range(most) for some in tasks.values() if i < len(some)]
    return turns[:count]


def ask(client: Any, text: str, **options: Any) -> Answer:
    """Run one streamed request to its end."""
    done = generate(client, text, return_stats=True, **options)
    totals = done.chunks[-1].totals
    return Answer(
        done.ids,
        totals["num_steps"],
        totals["total_draft_tokens"],
        totals["total_accepted_draft_tokens"],
        json.loads(totals["stats"])["requests_per_pass"],
    )
