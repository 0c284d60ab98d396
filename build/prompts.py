"""Cuts the held-out prompts of demo, tests and bench from held-out files; where is decided in build.cuts."""

import argparse
import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer

from build import cuts, edits
from build.corpus import Document, check_corpus, load_corpus
from build.errors import BuildError, run_command
from build.workspace import Workspace

PROMPTS = Path(__file__).resolve().parent.parent / "tests" / "data" / "prompts"
MAX_TOTAL_BYTES = 300_000
PER_TASK = 24


@dataclass(frozen=True)
class Task:
    """A kind of prompt: where it is cut, and its length in tokens."""

    name: str
    find: cuts.Finder
    min_tokens: int = 100
    max_tokens: int = 350
    per_file: int = 3


TASKS = (
    Task("completion", cuts.completions),
    Task("edit", edits.edits),
    Task("repetitive", cuts.repetitions),
    Task("docstring", cuts.docstrings, per_file=5),
    Task("long", cuts.long_contexts, min_tokens=1_400, max_tokens=1_600),
)


@dataclass(frozen=True)
class Prompt:
    """One line of a prompt file; source is the file in the standard library and the line where the text ends."""

    id: str
    task: str
    text: str
    source: str


def make_prompts(task: Task, documents: Iterable[Document], tokenizer: Tokenizer) -> list[Prompt]:
    """`PER_TASK` prompts of a task, few from each file, in an order that depends on their text alone."""
    chosen: list[cuts.Cut] = []
    for document in documents:
        found = task.find(document, _length(task, tokenizer))
        chosen += sorted(found, key=_shuffle_key)[: task.per_file]
    chosen = sorted(sorted(chosen, key=_shuffle_key)[:PER_TASK], key=lambda cut: cut.source)
    if len(chosen) < PER_TASK:
        raise BuildError(f"only {len(chosen)} of {PER_TASK} {task.name} prompts were found in the held-out files")
    return [Prompt(f"{task.name}-{i:02d}", task.name, cut.text, cut.source) for i, cut in enumerate(chosen)]


def write_prompts(prompts: list[Prompt], path: Path) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(prompt), ensure_ascii=False) + "\n" for prompt in prompts), "utf-8")


def main() -> None:
    """Command line: `python -m build.prompts` rewrites tests/data/prompts."""
    parser = argparse.ArgumentParser(prog="python -m build.prompts", description=__doc__)
    parser.add_argument(
        "--any-corpus", action="store_true", help="cut from another standard library than the recorded one"
    )
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


def _length(task: Task, tokenizer: Tokenizer) -> cuts.Length:
    """The task's limits with the tokenizer's count."""
    return cuts.Length(task.min_tokens, task.max_tokens, lambda text: len(tokenizer.encode(text).ids))


def _shuffle_key(cut: cuts.Cut) -> str:
    return hashlib.sha256(cut.text.encode()).hexdigest()


if __name__ == "__main__":
    run_command(main)
