"""Cuts the prompts of demo, tests and bench from held-out files: `python -m build.prompts`."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer

from build.corpus import Document, check_corpus, load_corpus
from build.edit_prompts import edits
from build.errors import BuildError, run_command
from build.excerpts import Excerpt, Finder, Length, completions, docstrings, long_contexts, repetitions
from build.workspace import ANY_CORPUS_HELP, Workspace

PROMPTS = Path(__file__).resolve().parent.parent / "tests" / "data" / "prompts"
MAX_TOTAL_BYTES = 300_000
PER_TASK = 24


@dataclass(frozen=True)
class Task:
    """A kind of prompt: how it is found, and its length in tokens."""

    name: str
    find: Finder
    min_tokens: int = 100
    max_tokens: int = 350
    per_file: int = 3


TASKS = (
    Task("completion", completions),
    Task("edit", edits),
    Task("repetitive", repetitions),
    Task("docstring", docstrings, per_file=5),
    Task("long", long_contexts, min_tokens=1_400, max_tokens=1_600),
)


@dataclass(frozen=True)
class Prompt:
    """One line of a prompt file. source: the file in the standard library and the line where the text ends."""

    id: str
    task: str
    text: str
    source: str


def make_prompts(task: Task, documents: Iterable[Document], tokenizer: Tokenizer) -> list[Prompt]:
    """Return `PER_TASK` prompts of a task, a few from each file, chosen by their texts' hashes, ordered by source."""
    length = Length(task.min_tokens, task.max_tokens, lambda text: len(tokenizer.encode(text).ids))
    chosen: list[Excerpt] = []
    for document in documents:
        chosen += sorted(task.find(document, length), key=_shuffle_key)[: task.per_file]
    chosen = sorted(sorted(chosen, key=_shuffle_key)[:PER_TASK], key=lambda excerpt: excerpt.source)
    if len(chosen) < PER_TASK:
        raise BuildError(f"only {len(chosen)} of {PER_TASK} {task.name} prompts were found in the held-out files")
    return [Prompt(f"{task.name}-{i:02d}", task.name, excerpt.text, excerpt.source) for i, excerpt in enumerate(chosen)]


def write_prompts(prompts: list[Prompt], path: Path) -> None:
    """Write one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(prompt), ensure_ascii=False) + "\n" for prompt in prompts), "utf-8")


def main() -> None:
    """Run the command, which rewrites tests/data/prompts."""
    parser = argparse.ArgumentParser(prog="python -m build.prompts", description=__doc__)
    parser.add_argument("--any-corpus", action="store_true", help=ANY_CORPUS_HELP)
    options = parser.parse_args()
    workspace, corpus = Workspace(), load_corpus()
    check_corpus(corpus, workspace.recorded_corpus("target"), options.any_corpus)
    for task in TASKS:
        prompts = make_prompts(task, corpus.held_out, workspace.tokenizer())
        write_prompts(prompts, PROMPTS / f"{task.name}.jsonl")
        print(f"{task.name}: {len(prompts)} prompts from {len({p.source.split(':')[0] for p in prompts})} files")
    total = sum(path.stat().st_size for path in PROMPTS.glob("*.jsonl"))
    if total > MAX_TOTAL_BYTES:
        raise BuildError(f"the prompts take {total} bytes, more than the {MAX_TOTAL_BYTES} allowed")


def _shuffle_key(excerpt: Excerpt) -> str:
    return hashlib.sha256(excerpt.text.encode()).hexdigest()


if __name__ == "__main__":
    run_command(main)
