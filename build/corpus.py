"""The training text: the source of this interpreter's standard library, split by file; it knows nothing of tokens."""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build.errors import BuildError

MAX_FILE_BYTES = 400_000
HELD_OUT_PERCENT = 4
# Files that are generated when the interpreter is built: they contain paths of that machine and differ between builds.
GENERATED_PREFIXES = ("_sysconfigdata", "config-")
FOREIGN_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class Document:
    """One source file. path: relative to the library's root. sha256: of its content."""

    path: str
    text: str
    sha256: str

    @property
    def held_out(self) -> bool:
        """True for about 4 % of the paths, chosen by the path's hash alone, so a new file does not move others."""
        bucket = int.from_bytes(hashlib.sha256(self.path.encode()).digest()[:4], "big") % 100
        return bucket < HELD_OUT_PERCENT


@dataclass(frozen=True)
class Corpus:
    """All documents in path order. origin: where they come from, for the record."""

    documents: tuple[Document, ...]
    origin: str

    @property
    def train(self) -> tuple[Document, ...]:
        """The documents that models and tokenizer may learn from."""
        return tuple(document for document in self.documents if not document.held_out)

    @property
    def held_out(self) -> tuple[Document, ...]:
        """The documents that are never trained on; losses and prompts are taken from them."""
        return tuple(document for document in self.documents if document.held_out)

    @property
    def sha256(self) -> str:
        """SHA-256 over the lines `path content-hash` in path order."""
        lines = "".join(f"{document.path} {document.sha256}\n" for document in self.documents)
        return hashlib.sha256(lines.encode()).hexdigest()

    @property
    def provenance(self) -> dict[str, Any]:
        """What a published model records about its corpus."""
        return {"sha256": self.sha256, "train_files": len(self.train), "held_out_files": len(self.held_out)}


def load_corpus(root: Path | None = None) -> Corpus:
    """Read the corpus below `root`, by default the running interpreter's standard library."""
    root = root or Path(sysconfig.get_path("stdlib"))
    documents = tuple(_documents(root))
    if not documents:
        raise BuildError(f"no Python source was found in {root}, so there is nothing to train on")
    return Corpus(documents, f"{platform.python_implementation()} {platform.python_version()}")


def check_corpus(corpus: Corpus, recorded_sha256: str | None, any_corpus: bool) -> None:
    """Raise BuildError unless the corpus is the recorded one, none is recorded yet, or any corpus is allowed."""
    if any_corpus or recorded_sha256 in (None, corpus.sha256):
        return
    raise BuildError(
        f"the corpus differs from the one the model was trained on ({corpus.origin}, SHA-256 "
        f"{corpus.sha256[:12]}, recorded {str(recorded_sha256)[:12]}); pass --any-corpus to use it anyway"
    )


def _documents(root: Path) -> Iterator[Document]:
    """Yield the readable source files below `root` in path order, except installed packages and generated files."""
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    for name in names:
        parts = name.split("/")
        if FOREIGN_FOLDERS.isdisjoint(parts) and not parts[0].startswith(GENERATED_PREFIXES):
            data = (root / name).read_bytes()
            if text := decoded(data, MAX_FILE_BYTES):
                yield Document(name, text, hashlib.sha256(data).hexdigest())


def decoded(data: bytes, max_bytes: int | None = None) -> str:
    """Return the text of a file, or "" if it is larger than `max_bytes` or not UTF-8."""
    if max_bytes is not None and len(data) > max_bytes:
        return ""
    try:
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return ""
