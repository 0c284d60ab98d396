"""Counts n-grams of any text for the method `ngram`: `python -m build.ngrams`."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from build.corpus import load_corpus
from build.errors import BuildError, run_command
from build.tokenizer import load_tokenizer
from build.workspace import MODELS
from orchestrator.core.sampled_drafts import MAX_CANDIDATES
from orchestrator.drafting.tables import MAX_ORDER, Level, Tables, save_tables, vocabulary_of

Ids = npt.NDArray[np.int64]


class Text(NamedTuple):
    """Documents, whose ends no n-gram crosses, and their provenance."""

    documents: list[str]
    provenance: dict[str, Any]


class Counts(NamedTuple):
    """Rows (r,), sorted by context, then follower: packed context, follower, and how often it followed the context."""

    contexts: Ids
    followers: Ids
    times: Ids

    def only(self, kept: npt.NDArray[np.bool_]) -> Counts:
        """Return the rows where `kept`, (r,) bool, is true."""
        return Counts(*(column[kept] for column in self))


@dataclass(frozen=True)
class Limits:
    """What is kept: n-grams seen `min_count` times, the `max_contexts` most frequent contexts of each length."""

    min_count: int = 2
    max_contexts: int = 60_000


def count_tables(documents: Sequence[Ids], tokenizer: Tokenizer, order: int, limits: Limits) -> Tables:
    """Return the tables of all n-grams up to `order`, with the MAX_CANDIDATES best followers per context."""
    vocabulary = vocabulary_of(tokenizer)
    if vocabulary.size ** (order - 1) >= 1 << 63:
        raise BuildError(f"a vocabulary of {vocabulary.size} tokens is too large for n-grams of order {order}")
    levels = [_level(count(documents, size, vocabulary.size), limits) for size in range(order)]
    return Tables(vocabulary, tuple(levels))


def count(documents: Sequence[Ids], size: int, vocab_size: int) -> Counts:
    """Count every context of `size` tokens with each of its followers."""
    digits = vocab_size ** np.arange(size - 1, -1, -1, dtype=np.int64)
    windows = [np.lib.stride_tricks.sliding_window_view(ids, size + 1) for ids in documents if len(ids) > size]
    if not windows:
        raise BuildError(f"the text has no {size + 1} tokens in a row, so there is nothing to count")
    contexts = np.concatenate([rows[:, :-1] @ digits for rows in windows])
    followers = np.concatenate([rows[:, -1] for rows in windows])
    order = np.lexsort((followers, contexts))
    contexts, followers = contexts[order], followers[order]
    changes = (np.diff(contexts) != 0) | (np.diff(followers) != 0)
    first = np.flatnonzero(np.concatenate([[True], changes]))
    return Counts(contexts[first], followers[first], np.diff(first, append=len(contexts)))


def _level(counts: Counts, limits: Limits) -> Level:
    counts = counts.only(counts.times >= limits.min_count)
    counts = _frequent_contexts(_best_followers(counts), limits.max_contexts)
    keys, first = np.unique(counts.contexts, return_index=True)
    return Level(keys, np.append(first, len(counts.contexts)), counts.followers, counts.times)


def _best_followers(counts: Counts) -> Counts:
    """Return the most frequent followers of each context; ties go to the lowest ids."""
    order = np.lexsort((counts.followers, -counts.times, counts.contexts))
    _, first, group = np.unique(counts.contexts[order], return_index=True, return_inverse=True)
    kept = np.zeros(len(order), np.bool_)
    kept[order] = np.arange(len(order)) - first[group] < MAX_CANDIDATES
    return counts.only(kept)


def _frequent_contexts(counts: Counts, max_contexts: int) -> Counts:
    """Return the rows of the most frequent contexts; ties go to the lowest keys."""
    keys, group = np.unique(counts.contexts, return_inverse=True)
    totals = np.bincount(group, counts.times, len(keys))
    kept = np.zeros(len(keys), np.bool_)
    kept[np.argsort(-totals, kind="stable")[:max_contexts]] = True
    return counts.only(kept[group])


def corpus_text() -> Text:
    """Return the training part of the demo corpus."""
    corpus = load_corpus()
    provenance = {"source": "Python standard library", "interpreter": corpus.origin, "licence": "PSF-2.0"}
    return Text([document.text for document in corpus.train], provenance | corpus.provenance)


def files_text(files: Sequence[Path]) -> Text:
    """Return the text of files, one document each."""
    digest, documents = hashlib.sha256(), []
    for file in files:
        try:
            documents.append(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise BuildError(f"{file} cannot be read as UTF-8 text: {error}") from None
        digest.update(hashlib.sha256(documents[-1].encode()).digest())
    return Text(documents, {"source": "files", "files": len(files), "sha256": digest.hexdigest()})


def publish(text: Text, tokenizer: Tokenizer, order: int, limits: Limits, folder: Path) -> None:
    """Count the text and write the tables and their provenance into `folder`."""
    encodings = tokenizer.encode_batch(text.documents, add_special_tokens=False)
    documents = [np.array(encoding.ids, np.int64) for encoding in encodings]
    tables = count_tables(documents, tokenizer, order, limits)
    save_tables(tables, folder)
    provenance = {
        "script": "build/ngrams.py",
        "corpus": text.provenance,
        "vocabulary": tables.vocabulary._asdict(),
        "order": order,
        "min_count": limits.min_count,
        "max_contexts": limits.max_contexts,
        "tokens": sum(len(ids) for ids in documents),
        "contexts": [len(level.keys) for level in tables.levels],
        "followers": [len(level.ids) for level in tables.levels],
    }
    (folder / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")


def main() -> None:
    """Run the command: `python -m build.ngrams --out FOLDER [FILES…]`."""
    parser = argparse.ArgumentParser(prog="python -m build.ngrams", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILES", help="UTF-8 text (default: the demo corpus)")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="the folder that ngram_tables will name"
    )
    parser.add_argument("--tokenizer", type=Path, default=MODELS / "target", metavar="FOLDER", help="the target's")
    parser.add_argument("--order", type=int, default=MAX_ORDER, choices=range(1, MAX_ORDER + 1), help="longest n-gram")
    parser.add_argument(
        "--min-count", type=int, default=Limits.min_count, metavar="K", help="n-grams seen less often are left out"
    )
    parser.add_argument("--max-contexts", type=int, default=Limits.max_contexts, metavar="M", help="of each length")
    options = parser.parse_args()
    text = files_text(options.files) if options.files else corpus_text()
    limits = Limits(options.min_count, options.max_contexts)
    publish(text, load_tokenizer(options.tokenizer), options.order, limits, options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    run_command(main)
