"""The corpus a run sees: text files, JSON lines, or the standard library; it does not know models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from build.corpus import Corpus, Document, load_corpus
from build.data import cached_stream
from build.errors import BuildError
from build.workspace import TrainingText, Workspace

#: A text file is cut at line ends into documents of about this many characters, some of which are held out.
DOCUMENT_CHARS = 8_000
STANDARD_LIBRARY = "Python standard library"
#: Keys of a JSON line that hold text, or lists of turns that do.
TEXT_KEYS = ("text", "content", "value", "prompt", "completion", "instruction", "input", "output", "response")
TURN_KEYS = ("messages", "conversations")


def heads_text(target: str, corpus: str, workspace: Workspace, scratch: Path) -> TrainingText:
    """The corpus as the target's tokens. corpus: a file, a folder, or empty for the standard library."""
    found = _library() if not corpus else read_corpus(Path(corpus))
    if not found.train or not found.held_out:
        raise BuildError(f"{corpus}: {len(found.documents)} documents are too few to hold some out; give more text")
    if Path(target).resolve() == (workspace.models / "target").resolve():
        folder = workspace.scratch / f"tokens-{found.sha256[:12]}"  # the target's own training read the same
    else:
        folder = scratch / f"tokens-{found.sha256[:12]}-{hashlib.sha256(target.encode()).hexdigest()[:8]}"
    tokenizer, end_id = _tokenizer(target)
    streams = [
        cached_stream(folder / f"{name}.npy", tokenizer, documents, end_id)
        for name, documents in (("train", found.train), ("held_out", found.held_out))
    ]
    return TrainingText(found, *streams)


def _library() -> Corpus:
    """The standard library that the demo models are trained on."""
    found = load_corpus()
    return replace(found, interpreter=f"{STANDARD_LIBRARY}, {found.interpreter}")


def read_corpus(path: Path) -> Corpus:
    """The documents of a .jsonl file, of any other text file, or of all files below a folder."""
    if not path.exists():
        raise BuildError(f"the corpus {path} does not exist (--corpus FILE.txt, FILE.jsonl or a folder)")
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    documents = tuple(
        Document(f"{file.relative_to(path.parent)}#{number}", text, hashlib.sha256(text.encode()).hexdigest())
        for file in files
        for number, text in enumerate(_texts(file))
    )
    if not documents:
        raise BuildError(f"the corpus {path} holds no text")
    return Corpus(documents, path.name)


def _texts(file: Path) -> Iterator[str]:
    try:
        content = file.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return
    if file.suffix == ".jsonl":
        yield from (text for line in enumerate(content.splitlines(), 1) if (text := _line_text(file, *line)))
    else:
        yield from _cut(content)


def _cut(content: str) -> Iterator[str]:
    """Pieces of whole lines, of DOCUMENT_CHARS or somewhat more."""
    start = end = 0
    for line in content.splitlines(keepends=True):
        end += len(line)
        if end - start >= DOCUMENT_CHARS:
            yield content[start:end]
            start = end
    if content[start:].strip():
        yield content[start:]


def _line_text(file: Path, number: int, line: str) -> str:
    if not line.strip():
        return ""
    try:
        found = _text_of(json.loads(line))
    except ValueError as error:
        raise BuildError(f"{file}, line {number} is no JSON: {error}") from None
    if not found:
        raise BuildError(f"{file}, line {number} has no text under {', '.join((*TEXT_KEYS, *TURN_KEYS))}")
    return found


def _text_of(value: Any) -> str:
    """The text of a JSON value: itself, or what stands under the known keys, in their order, a line each."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(part for turn in value if (part := _text_of(turn)))
    if not isinstance(value, dict):
        return ""
    return "\n".join(part for key in (*TEXT_KEYS, *TURN_KEYS) if (part := _text_of(value.get(key))))


def _tokenizer(target: str) -> tuple[Tokenizer, int]:
    """The target's tokenizer and the token that ends its documents."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise BuildError(f"{target} has no tokenizer: {(str(error).splitlines() or [''])[0]}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise BuildError(f"{target} has no tokenizer.json, which is needed to encode a corpus")
    end_id = tokenizer.eos_token_id
    return tokenizer.backend_tokenizer, int(end_id if end_id is not None else 0)
