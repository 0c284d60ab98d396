"""Token statistics that `python -m build.ngrams` counts: how often each token followed a context."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from native.drafts import LikeliestFollowers, NativeTables
from orchestrator.core.arrays import FloatArray
from orchestrator.core.derived import derived_once
from orchestrator.core.errors import ConfigError

FILE = "ngrams.npz"
#: Longest n-gram: a context of three tokens of any vocabulary below 2²¹ fits into an int64.
MAX_ORDER = 4
WHERE = "key ngram_tables in the deployment file"
REMEDY = f"count again with python -m build.ngrams, or leave the key empty ({WHERE})"

Integers = npt.NDArray[Any]


class Followers(NamedTuple):
    """The tokens that followed a context: ids (k,) int64 ascending; weights (k,) float64 > 0, how often each did."""

    ids: npt.NDArray[np.int64]
    weights: FloatArray


class VocabularyFingerprint(NamedTuple):
    """Identifies a vocabulary: its number of tokens, and the SHA-256 of the lines `id token` in id order."""

    size: int
    sha256: str


@dataclass(frozen=True, eq=False)
class Level:
    """All known contexts of one length.

    keys: (c,) int, packed contexts, ascending.
    starts: (c + 1,) int; the followers of context i are starts[i]…starts[i + 1] − 1.
    ids, weights: (f,) int, the followers and their counts; ids ascending within a context.
    """

    keys: Integers
    starts: Integers
    ids: Integers
    weights: Integers | FloatArray

    def followers(self, key: int) -> Followers | None:
        """Return the tokens that followed a context, None when it is unknown, by a binary search."""
        row = int(self.keys.searchsorted(key))
        if row == len(self.keys) or self.keys[row] != key:
            return None
        kept = slice(self.starts[row], self.starts[row + 1])
        return Followers(self.ids[kept].astype(np.int64), self.weights[kept].astype(np.float64))


@dataclass(frozen=True, eq=False)
class Tables:
    """levels[k]: the contexts of k tokens, which gives n-grams up to n = len(levels)."""

    vocabulary: VocabularyFingerprint
    levels: tuple[Level, ...]

    def followers(self, context: Sequence[int]) -> Followers | None:
        """Return the tokens that followed all of `context`, None when it is unknown."""
        if len(context) >= len(self.levels):
            return None
        return self.levels[len(context)].followers(packed(context, self.vocabulary.size))


def packed(context: Sequence[int], vocab_size: int) -> int:
    """Return a context as one number, whose digits in base vocab_size are its ids."""
    key = 0
    for token in context:
        key = key * vocab_size + token
    return key


def vocabulary_of(tokenizer: Tokenizer) -> VocabularyFingerprint:
    """Return the fingerprint that tells whether two tokenizers give every token the same id."""
    ids = sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items())
    lines = "".join(f"{token_id} {token}\n" for token_id, token in ids)
    return VocabularyFingerprint(ids[-1][0] + 1 if ids else 0, hashlib.sha256(lines.encode()).hexdigest())


def save_tables(tables: Tables, folder: Path) -> None:
    """Write the tables, each array in its smallest type; keys as differences and starts as lengths compress better."""
    arrays: dict[str, Integers] = {
        "vocab_size": np.array(tables.vocabulary.size),
        "vocab_sha256": np.frombuffer(bytes.fromhex(tables.vocabulary.sha256), np.uint8),
    }
    for size, level in enumerate(tables.levels):
        arrays[f"steps_{size}"] = np.diff(level.keys, prepend=0)
        arrays[f"lengths_{size}"] = np.diff(level.starts)
        arrays[f"ids_{size}"] = level.ids
        arrays[f"weights_{size}"] = level.weights
    folder.mkdir(parents=True, exist_ok=True)
    small = {name: values.astype(np.min_scalar_type(values.max(initial=0))) for name, values in arrays.items()}
    np.savez_compressed(folder / FILE, **small)


def load_tables(folder: str | Path, tokenizer: Tokenizer) -> Tables:
    """Read the tables of a folder; raises ConfigError for a broken file or a vocabulary other than the target's.

    Nothing in the file is executed (no pickle), and every array is checked, so that no lookup can fail later.
    """
    file = Path(folder) / FILE
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            tables = _unpacked(arrays)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error} ({WHERE})") from None
    except (ValueError, KeyError, TypeError, IndexError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(f"{file} holds no token statistics: {error} ({WHERE})") from None
    _check_vocabulary(file, tables.vocabulary, vocabulary_of(tokenizer))
    return tables


def _unpacked(arrays: Mapping[str, Integers]) -> Tables:
    vocab_size = int(arrays["vocab_size"])
    sha256 = arrays["vocab_sha256"].astype(np.uint8).tobytes().hex()
    sizes = [size for size in range(MAX_ORDER) if f"ids_{size}" in arrays]
    if not sizes or sizes[-1] >= len(sizes):
        raise ValueError("contexts of some length are missing")
    if any(arrays[name].dtype.kind not in "ui" for name in arrays):
        raise ValueError("its arrays are not integers")
    return Tables(VocabularyFingerprint(vocab_size, sha256), tuple(_level(arrays, size, vocab_size) for size in sizes))


def _level(arrays: Mapping[str, Integers], size: int, vocab_size: int) -> Level:
    steps, lengths = arrays[f"steps_{size}"], arrays[f"lengths_{size}"].astype(np.int64)
    ids, weights = arrays[f"ids_{size}"], arrays[f"weights_{size}"]
    keys, starts = np.cumsum(steps, dtype=np.int64), np.concatenate([[0], np.cumsum(lengths)])
    is_sound = (
        len(steps) == len(lengths)
        and len(ids) == len(weights) == starts[-1]
        and (steps[1:] > 0).all()
        and (lengths > 0).all()
        and (weights > 0).all()
        and 0 <= ids.min(initial=0) <= ids.max(initial=0) < vocab_size
    )
    if not is_sound:
        raise ValueError(f"its arrays for contexts of {size} tokens do not fit together")
    return Level(keys, starts, ids, weights)


def _check_vocabulary(file: Path, counted: VocabularyFingerprint, served: VocabularyFingerprint) -> None:
    if counted.size != served.size:
        raise ConfigError(
            f"{file} was counted with a vocabulary of {counted.size} tokens, the target's has {served.size}; {REMEDY}"
        )
    if counted.sha256 != served.sha256:
        raise ConfigError(
            f"{file} was counted with another vocabulary of {counted.size} tokens than the target's: SHA-256 "
            f"{counted.sha256[:12]}, the target's {served.sha256[:12]}; {REMEDY}"
        )


@derived_once
def native_tables(tables: Tables) -> NativeTables:
    """Return the likeliest followers in the layout that native proposers read."""
    return NativeTables(likeliest_followers(tables), tables.vocabulary.size)


def likeliest_followers(tables: Tables) -> tuple[LikeliestFollowers, ...]:
    """Return the most frequent follower of each context of 1, 2, … tokens, the lowest id among equals.

    Evidence: 10 × length of the context + 2 × the follower's share in fifths + 1 if the context occurred at least 4 ×.
    """
    return tuple(_likeliest(level, length) for length, level in enumerate(tables.levels[1:], start=1))


def _likeliest(level: Level, length: int) -> LikeliestFollowers:
    starts, weights = level.starts[:-1].astype(np.int64), level.weights.astype(np.float64)
    if not len(starts):
        return LikeliestFollowers(np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int32))
    most, totals = np.maximum.reduceat(weights, starts), np.add.reduceat(weights, starts)
    contexts = np.repeat(np.arange(len(starts)), np.diff(level.starts.astype(np.int64)))
    _, first = np.unique(contexts[is_most := weights == most[contexts]], return_index=True)
    tokens = level.ids[np.flatnonzero(is_most)[first]].astype(np.int32)
    evidence = 10 * length + 2 * (4.99 * most / totals).astype(np.int32) + (totals >= 4)
    return LikeliestFollowers(level.keys.astype(np.int64), tokens, evidence.astype(np.int32))
