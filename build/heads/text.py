"""The corpus a run sees: text files, JSON lines, or the standard library; it does not know models."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from build.corpus import Corpus, Document, load_corpus
from build.data import cached_stream
from build.errors import BuildError
from build.heads.lines import ChatTemplate, Piece, piece_of
from build.workspace import TrainingText, Workspace
from orchestrator.core.errors import ConfigError, first_line
from orchestrator.deployment.checkpoint import read_checkpoint

#: A text file is cut at line ends into documents of about this many characters, some of which are held out.
DOCUMENT_CHARS = 8_000
STANDARD_LIBRARY = "Python standard library"


@dataclass(frozen=True)
class HeadsText(TrainingText):
    """The corpus as token streams, and how they were written.

    chat_template: whether chats went through the target's. special_tokens: what its tokenizer adds to each document.
    """

    chat_template: bool
    special_tokens: tuple[str, ...]


class TargetTokenizer(NamedTuple):
    """How the target reads text: as the server encodes a prompt.

    end_id: the token that ends documents. template: of chats, None where the target has none.
    """

    tokenizer: Tokenizer
    end_id: int
    template: ChatTemplate | None

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The tokens that it adds to every text."""
        return tuple(self.tokenizer.encode("").tokens)

    @property
    def key(self) -> str:
        """Names the streams of this tokenizer."""
        return hashlib.sha256(f"{self.end_id} {self.tokenizer.to_str()}".encode()).hexdigest()[:8]


def heads_text(target: str, corpus: str, workspace: Workspace, scratch: Path) -> HeadsText:
    """The corpus as the target's tokens. corpus: a file, a folder, or empty for the standard library."""
    reader = target_tokenizer(target)
    found = _library() if not corpus else read_corpus(Path(corpus), reader.template)
    if not found.train or not found.held_out:
        raise BuildError(f"{corpus}: {len(found.documents)} documents are too few to hold some out; give more text")
    if Path(target).resolve() == (workspace.models / "target").resolve():
        folder = workspace.scratch / f"tokens-{found.sha256[:12]}"  # the target's own training read the same
    else:
        folder = scratch / f"tokens-{found.sha256[:12]}-{reader.key}"
    train, held_out = (
        cached_stream(folder / f"{name}.npy", reader.tokenizer, documents, reader.end_id)
        for name, documents in (("train", found.train), ("held_out", found.held_out))
    )
    templated = reader.template is not None and reader.template.num_chats > 0
    return HeadsText(found, train, held_out, templated, reader.special_tokens)


def _library() -> Corpus:
    """The standard library that the demo models are trained on."""
    found = load_corpus()
    return replace(found, interpreter=f"{STANDARD_LIBRARY}, {found.interpreter}")


def read_corpus(path: Path, template: ChatTemplate | None = None) -> Corpus:
    """The documents of a .jsonl file, of any other text file, or of all files below a folder."""
    if not path.exists():
        raise BuildError(f"the corpus {path} does not exist (--corpus FILE.txt, FILE.jsonl or a folder)")
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    pieces = [
        (f"{file.relative_to(path.parent)}#{number}", piece)
        for file in files
        for number, piece in enumerate(_pieces(file, template))
    ]
    documents = tuple(
        Document(name, piece.text, hashlib.sha256(piece.source.encode()).hexdigest())
        for name, piece in pieces
        if piece.text
    )
    if not documents:
        raise BuildError(f"the corpus {path} holds no text")
    if len(documents) < len(pieces):
        print(f"{path}: {len(pieces) - len(documents)} documents without text are skipped")
    return Corpus(documents, path.name)


def _pieces(file: Path, template: ChatTemplate | None) -> Iterator[Piece]:
    try:
        content = file.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return
    if file.suffix == ".jsonl":
        # JSON text may hold what str.splitlines() takes for the end of a line.
        lines = enumerate(content.split("\n"), start=1)
        yield from (_piece(file, number, line, template) for number, line in lines if line.strip())
    else:
        yield from (Piece(text, text) for text in _cut(content))


def _piece(file: Path, number: int, line: str, template: ChatTemplate | None) -> Piece:
    try:
        return piece_of(line, template)
    except BuildError as error:
        raise BuildError(f"{file}, line {number} {error}") from None


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


def target_tokenizer(target: str) -> TargetTokenizer:
    """The target's tokenizer and chat template; raises BuildError when it has no tokenizer."""
    try:
        tokenizer = read_checkpoint(target).tokenizer
        whole: Any = AutoTokenizer.from_pretrained(target, trust_remote_code=False)
    except (ConfigError, OSError, ValueError) as error:
        raise BuildError(f"{target} has no tokenizer: {first_line(error)}") from error
    tokenizer.no_truncation()  # some files cut or fill up prompts, and documents are longer
    tokenizer.no_padding()
    added = tokenizer.encode("").tokens[:1] == [whole.bos_token]
    template = ChatTemplate(whole, whole.bos_token if added else "") if whole.chat_template else None
    return TargetTokenizer(tokenizer, int(whole.eos_token_id or 0), template)
