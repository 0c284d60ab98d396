"""The corpus as the target reads it: text files, JSON lines, or the standard library; it knows nothing of models."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from build.corpus import Corpus, Document, decoded, load_corpus
from build.data import cached_stream
from build.errors import BuildError
from build.heads.json_documents import ChatTemplate, ParsedText, parse_lines
from build.workspace import TrainingText, Workspace
from orchestrator.core.deployment.checkpoint import read_checkpoint
from orchestrator.core.errors import ConfigError, first_line
from runtime.models.stock import read_pretrained

#: A text file is cut at line ends into documents of about this many characters, some of which are held out.
DOCUMENT_CHARS = 8_000
STANDARD_LIBRARY = "Python standard library"


@dataclass(frozen=True)
class HeadsText(TrainingText):
    """The corpus as token streams, and how it was encoded.

    chat_template: whether the target's was applied to chats. special_tokens: those added to each document.
    """

    chat_template: bool
    special_tokens: tuple[str, ...]


class TargetTokenizer(NamedTuple):
    """The target's tokenizer, which encodes documents as the server encodes a prompt.

    end_id: the token that ends documents. template: for chats, None if the target has none.
    """

    tokenizer: Tokenizer
    end_id: int
    template: ChatTemplate | None

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The tokens that it adds to every text."""
        return tuple(self.tokenizer.encode("").tokens)


def heads_text(target: str, corpus: str, workspace: Workspace, scratch: Path) -> HeadsText:
    """Encode the corpus for the target. corpus: a file, a folder, or "" for the standard library."""
    reader = target_tokenizer(target)
    if corpus:
        found = read_corpus(Path(corpus), reader.template)
    else:
        found = load_corpus()
        found = replace(found, origin=f"{STANDARD_LIBRARY}, {found.origin}")
    if not found.train or not found.held_out:
        raise BuildError(f"{corpus}: {len(found.documents)} documents are too few to hold some out; give more text")
    if Path(target).resolve() == (workspace.models / "target").resolve():
        folder = workspace.scratch / f"tokens-{found.sha256[:12]}"  # shared with the target's own training
    else:
        key = hashlib.sha256(f"{reader.end_id} {reader.tokenizer.to_str()}".encode()).hexdigest()[:8]
        folder = scratch / f"tokens-{found.sha256[:12]}-{key}"
    train, held_out = (
        cached_stream(folder / f"{name}.npy", reader.tokenizer, documents, reader.end_id)
        for name, documents in (("train", found.train), ("held_out", found.held_out))
    )
    templated = reader.template is not None and reader.template.num_chats > 0
    return HeadsText(found, train, held_out, templated, reader.special_tokens)


def read_corpus(path: Path, template: ChatTemplate | None = None) -> Corpus:
    """Read the documents of a .jsonl file, of any other text file, or of all files below a folder."""
    if not path.exists():
        raise BuildError(f"the corpus {path} does not exist (--corpus FILE.txt, FILE.jsonl or a folder)")
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    texts = [
        (f"{file.relative_to(path.parent)}#{number}", parsed)
        for file in files
        for number, parsed in enumerate(_texts(file, template))
    ]
    documents = tuple(
        Document(name, parsed.text, hashlib.sha256(parsed.source.encode()).hexdigest())
        for name, parsed in texts
        if parsed.text
    )
    if not documents:
        raise BuildError(f"the corpus {path} holds no text")
    if len(documents) < len(texts):
        print(f"{path}: {len(texts) - len(documents)} documents without text are skipped")
    return Corpus(documents, path.name)


def _texts(file: Path, template: ChatTemplate | None) -> Iterator[ParsedText]:
    content = decoded(file.read_bytes())
    if file.suffix != ".jsonl":
        yield from (ParsedText(text, text) for text in _split(content))
        return
    # Not splitlines(): JSON text may contain other characters that it takes for the end of a line.
    yield from parse_lines(file, content.split("\n"), template)


def _split(content: str) -> Iterator[str]:
    """Yield pieces of whole lines, of DOCUMENT_CHARS or a little more."""
    start = end = 0
    for line in content.splitlines(keepends=True):
        end += len(line)
        if end - start >= DOCUMENT_CHARS:
            yield content[start:end]
            start = end
    if content[start:].strip():
        yield content[start:]


def target_tokenizer(target: str) -> TargetTokenizer:
    """Load the target's tokenizer and chat template; raises BuildError if it has no tokenizer."""
    try:
        tokenizer = read_checkpoint(target).tokenizer
        whole: Any = read_pretrained(AutoTokenizer, target)
    except (ConfigError, OSError, ValueError) as error:
        raise BuildError(f"{target} has no tokenizer: {first_line(error)}") from error
    adds_bos = tokenizer.encode("").tokens[:1] == [whole.bos_token]
    template = ChatTemplate(whole, whole.bos_token if adds_bos else "") if whole.chat_template else None
    return TargetTokenizer(tokenizer, int(whole.eos_token_id or 0), template)
