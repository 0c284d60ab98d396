"""A preloaded corpus to draft from: an index that `python -m build.corpus_index` writes and processes share by mmap."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from native.drafts import NativeCorpus
from orchestrator.core.arrays import IdArray
from orchestrator.core.derived import derived_once
from orchestrator.core.errors import ConfigError
from orchestrator.drafting.tables import VocabularyFingerprint, vocabulary_of

MANIFEST, TOKENS, ENDS = "corpus.json", "tokens-{:03}.npy", "ends-{:03}.npy"
FORMAT = 1
#: Longest text that is looked up; the index is sorted by this many tokens.
MAX_DEPTH = 64
#: Maximum places examined of those where a text occurs, evenly spread over them.
MAX_PLACES = 256
WHERE = "key corpus_index in the deployment file"
REMEDY = f"build it again with python -m build.corpus_index, or leave the key empty ({WHERE})"

Ends = npt.NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class Shard:
    """A part of the corpus, mapped from its files.

    tokens: (n,) int32, the documents, each followed by the separator, whose id is the vocabulary's size.
    ends: (e,) uint32, a suffix array: the place i of every token that has another one before it in its document, sorted
    by tokens[i − 1], tokens[i − 2], …, at most MAX_DEPTH of them; so the places after equal text are neighbours.
    """

    tokens: IdArray
    ends: Ends

    def before(self, end: int, length: int) -> list[int]:
        """Return up to `length` tokens before a place, the nearest first."""
        found: list[int] = self.tokens[max(end - length, 0) : end][::-1].tolist()
        return found

    def places(self, backwards: list[int]) -> Ends:
        """Return the places that follow these tokens, given the nearest first."""
        size = len(backwards)
        first = bisect_left(self.ends, backwards, key=lambda end: self.before(int(end), size))
        last = bisect_right(self.ends, backwards, lo=first, key=lambda end: self.before(int(end), size))
        return self.ends[first:last]


class Corpus:
    """The shards of an index; any thread may call, nothing is written.

    separator: the id that ends a document; not in the vocabulary.
    A look-up costs O(log n) comparisons of at most MAX_DEPTH tokens in each shard.
    """

    def __init__(self, shards: Sequence[Shard], separator: int) -> None:
        self.separator = separator
        self.shards = tuple(shards)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, separators included."""
        return sum(len(shard.tokens) for shard in self.shards)

    def followers(self, context: Sequence[int]) -> Counter[int]:
        """Return {token: how often it followed all of `context`}, of at most MAX_DEPTH tokens.

        In a shard with more than MAX_PLACES places, the count is estimated from that many.
        """
        counts: Counter[int] = Counter()
        for shard in self.shards:
            places = shard.places(list(context[::-1]))
            seen = _spread(places, MAX_PLACES)
            if len(seen):
                ids, times = np.unique(shard.tokens[seen], return_counts=True)
                weight = len(places) / len(seen)
                counts.update({int(token): round(weight * count) for token, count in zip(ids, times, strict=True)})
        return counts


@derived_once
def native_corpus(corpus: Corpus) -> NativeCorpus:
    """Return the corpus in the layout that native proposers read."""
    return NativeCorpus([(shard.tokens, shard.ends) for shard in corpus.shards], corpus.separator)


def _spread(places: Ends, most: int) -> npt.NDArray[np.int64]:
    """Return at most `most` of the places, evenly spread, the first one among them."""
    chosen = np.arange(min(len(places), most), dtype=np.int64) * len(places) // max(min(len(places), most), 1)
    spread: npt.NDArray[np.int64] = places[chosen].astype(np.int64)
    return spread


def load_corpus_index(folder: str | Path, tokenizer: Tokenizer) -> Corpus:
    """Map an index; raises ConfigError for a broken one, and for a vocabulary other than the target's.

    Nothing in the files is executed (no pickle), and every array is checked, so that no look-up can fail later.
    """
    root = Path(folder)
    try:
        manifest = json.loads((root / MANIFEST).read_text(encoding="utf-8"))
        counted = VocabularyFingerprint(manifest["vocabulary"]["size"], manifest["vocabulary"]["sha256"])
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']}, this server reads {FORMAT}")
        shards = [_mapped(root, number, counted.size) for number in range(manifest["shards"])]
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename or root}: {error.strerror or error} ({WHERE})") from None
    except (ValueError, KeyError, TypeError, EOFError) as error:
        raise ConfigError(f"{root} holds no corpus index: {error}; {REMEDY}") from None
    if (served := vocabulary_of(tokenizer)) != counted:
        raise ConfigError(
            f"{root} was indexed with another vocabulary ({counted.size} tokens, SHA-256 {counted.sha256[:12]}) than "
            f"the target's ({served.size} tokens, {served.sha256[:12]}); {REMEDY}"
        )
    return Corpus(shards, counted.size)


def _mapped(root: Path, number: int, vocab_size: int) -> Shard:
    arrays: list[Any] = [
        np.load(root / name.format(number), mmap_mode="r", allow_pickle=False) for name in (TOKENS, ENDS)
    ]
    tokens, ends = arrays
    is_sound = (
        tokens.dtype == np.int32
        and ends.dtype == np.uint32
        and tokens.ndim == ends.ndim == 1
        and 0 <= tokens.min(initial=0) <= tokens.max(initial=0) <= vocab_size
        and ends.max(initial=0) < max(len(tokens), 1)
    )
    if not is_sound:
        raise ValueError(f"the arrays of shard {number} do not fit together")
    return Shard(tokens, ends)
