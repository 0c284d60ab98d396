"""Indexes text for the methods `auto`, `suffix` and `ngram`: `python -m build.corpus_index --out FOLDER FILES…`."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from build.errors import BuildError, run_command
from build.heads.json_documents import parse_lines
from build.heads.text import TargetTokenizer, target_tokenizer
from build.workspace import MODELS, publish_folder
from orchestrator.core.arrays import IdArray
from orchestrator.core.deployment.config import load_config
from orchestrator.drafting.corpus import ENDS, FORMAT, MANIFEST, MAX_DEPTH, TOKENS, Ends
from orchestrator.drafting.tables import vocabulary_of

#: Text is read and encoded in pieces of about this many characters.
PIECE_CHARS = 1 << 20
#: Number of documents that are encoded together.
BATCH = 256
#: Tokens of a shard; building one takes about 100 bytes of memory per token.
SHARD_TOKENS = 4_000_000
MAX_SHARDS = 1000


def documents_of(files: Sequence[Path], reader: TargetTokenizer) -> Iterator[str]:
    """Yield the documents: each line of a .jsonl file, and every other file in pieces of whole lines."""
    for file in files:
        try:
            with file.open(encoding="utf-8", newline="\n") as stream:
                if file.suffix == ".jsonl":
                    yield from (parsed.text for parsed in parse_lines(file, stream, reader.template))
                else:
                    while lines := stream.readlines(PIECE_CHARS):
                        yield "".join(lines)
        except (OSError, UnicodeDecodeError) as error:
            raise BuildError(f"{file} cannot be read as UTF-8 text: {error}") from None


def encoded(documents: Iterator[str], reader: TargetTokenizer) -> Iterator[list[int]]:
    """Yield the ids of each document, except empty ones."""
    while batch := list(islice(documents, BATCH)):
        for encoding in reader.tokenizer.encode_batch(batch, add_special_tokens=False):
            if encoding.ids:
                yield encoding.ids


def shards_of(documents: Iterator[list[int]], separator: int, most: int) -> Iterator[IdArray]:
    """Yield streams of at most `most` tokens, each document ended by the separator; longer documents are cut."""
    stream: list[int] = []
    for ids in documents:
        for start in range(0, len(ids), most - 1):
            piece = ids[start : start + most - 1]
            if len(stream) + len(piece) + 1 > most:
                yield np.array(stream, np.int32)
                stream = []
            stream += [*piece, separator]
    if stream:
        yield np.array(stream, np.int32)


def sorted_ends(tokens: IdArray, separator: int) -> Ends:
    """Return the places of all tokens but the first of each document, sorted by the text before them.

    tokens: (n,) int32. The texts before the places are compared backwards, over up to MAX_DEPTH tokens; among equal
    texts the earlier place comes first. Prefix doubling: each round combines the ranks at two places into a rank over
    twice as many tokens.
    """
    reach = 1
    ranks = tokens.astype(np.int64) + 1  # of the text that ends with token i; 0: no text
    while reach < MAX_DEPTH:
        further = np.zeros_like(ranks)
        further[reach:] = ranks[:-reach]
        _, joined = np.unique(ranks * (int(further.max()) + 1) + further, return_inverse=True)
        ranks, reach = joined.astype(np.int64) + 1, 2 * reach
    places = np.flatnonzero((tokens[:-1] != separator) & (tokens[1:] != separator)) + 1
    return places[ranks[places - 1].argsort(kind="stable")].astype(np.uint32)


def build_index(files: Sequence[Path], target: str, folder: Path, shard_tokens: int = SHARD_TOKENS) -> int:
    """Write the index of the files into `folder`, the manifest last; return the number of tokens in it."""
    if folder.exists() and not (folder / MANIFEST).exists() and any(folder.iterdir()):
        raise BuildError(f"{folder} exists and is not a corpus index: choose another folder (--out)")
    reader = target_tokenizer(target)
    vocabulary = vocabulary_of(reader.tokenizer)
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    sizes: list[int] = []
    for number, tokens in enumerate(
        shards_of(encoded(documents_of(files, reader), reader), vocabulary.size, shard_tokens)
    ):
        if number == MAX_SHARDS:
            raise BuildError(f"the text fills more than {MAX_SHARDS} shards of {shard_tokens} tokens (--shard-tokens)")
        np.save(partial / TOKENS.format(number), tokens)
        np.save(partial / ENDS.format(number), sorted_ends(tokens, vocabulary.size))
        sizes.append(len(tokens))
        print(f"shard {number}: {len(tokens)} tokens")
    if not sizes:
        raise BuildError(f"{', '.join(map(str, files))}: there is no text to index")
    manifest = {"format": FORMAT, "shards": len(sizes), "tokens": sum(sizes), "vocabulary": vocabulary._asdict()}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    publish_folder(partial, folder)
    return sum(sizes)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m build.corpus_index", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILES", help="UTF-8 text, or JSON lines (.jsonl)")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="the folder that corpus_index will name"
    )
    parser.add_argument(
        "--config",
        type=Path,
        default=MODELS.parent / "serving.toml",
        metavar="FILE",
        help="the deployment, whose target reads it",
    )
    parser.add_argument("--target", metavar="MODEL", help="in place of the deployment's: a folder or a hub id")
    parser.add_argument(
        "--shard-tokens", type=int, default=SHARD_TOKENS, metavar="N", help="tokens indexed at once (%(default)s)"
    )
    options = parser.parse_args()
    if not 1000 <= options.shard_tokens <= 1 << 28:
        raise BuildError(f"--shard-tokens must be in 1000..{1 << 28}, got {options.shard_tokens}")
    target = options.target or load_config(options.config).target
    print(f"wrote {options.out}: {build_index(options.files, target, options.out, options.shard_tokens)} tokens")


if __name__ == "__main__":
    run_command(main)
