"""The file of token statistics: what is written is read, and what does not fit is refused in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from orchestrator.core.errors import ConfigError
from orchestrator.drafting.tables import FILE, Tables, load_tables, save_tables, vocabulary_of
from tests.support.counted import tables_of
from tests.support.tiny_models import write_byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def small(tokenizer: Tokenizer) -> Tables:
    made = tables_of({(): {0: 5, 3: 9}, (1,): {2: 4, 3: 1}, (60,): {62: 7}, (62, 62): {0: 1}}, 63)
    levels = tuple(replace(level, weights=level.weights.astype(np.int64)) for level in made.levels)
    return replace(made, vocabulary=vocabulary_of(tokenizer), levels=levels)


def test_tables_saved_load_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert vocabulary_of(tokenizer).size == 63
    save_tables(small(tokenizer), tmp_path / "new")
    loaded = load_tables(tmp_path / "new", tokenizer)
    for context in ([], [1], [60], [62, 62], [61], [2, 1], [0], [62, 61], [1, 2, 3], [0, 0, 0, 0]):
        ours, theirs = small(tokenizer).followers(context), loaded.followers(context)
        assert (ours is None) == (theirs is None)
        if ours and theirs:
            assert ours.ids.tolist() == theirs.ids.tolist() and ours.weights.tolist() == theirs.weights.tolist()
    first = (tmp_path / "new" / FILE).read_bytes()
    save_tables(small(tokenizer), tmp_path / "again")
    assert (tmp_path / "again" / FILE).read_bytes() == first


def refusal(folder: Path, tokenizer: Tokenizer) -> str:
    with pytest.raises(ConfigError) as caught:
        load_tables(folder, tokenizer)
    assert "\n" not in str(caught.value) and "key ngram_tables in the deployment file" in str(caught.value)
    return str(caught.value)


def test_tables_of_another_vocabulary_are_refused_with_the_two_numbers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    made = small(tokenizer)
    save_tables(replace(made, vocabulary=made.vocabulary._replace(size=64)), tmp_path)
    assert "a vocabulary of 64 tokens, the target's has 63" in refusal(tmp_path, tokenizer)
    save_tables(replace(made, vocabulary=made.vocabulary._replace(sha256="ab" * 32)), tmp_path)
    said = refusal(tmp_path, tokenizer)
    assert "another vocabulary of 63 tokens" in said and "abababababab" in said


def test_tables_that_are_missing_broken_or_pickled_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path, tokenizer)
    file = tmp_path / FILE
    save_tables(small(tokenizer), tmp_path)
    whole = file.read_bytes()
    for broken in (b"", b"not a zip", whole[:100], whole[: len(whole) // 2], b"PK\x03\x04" + whole[4:60]):
        file.write_bytes(broken)
        refusal(tmp_path, tokenizer)
    np.savez(file, ids_0=np.array([{}], dtype=object), vocab_size=np.array(63))
    assert "holds no token statistics" in refusal(tmp_path, tokenizer)
    with file.open("wb") as stream:
        np.save(stream, np.arange(3))
    refusal(tmp_path, tokenizer)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("ids_0", [0, 99]),
        ("ids_0", [0]),
        ("ids_0", []),
        ("ids_1", []),
        ("steps_2", []),
        ("vocab_size", []),
        ("lengths_1", [1, 1, 1]),
        ("lengths_1", [3, 0]),
        ("steps_1", [1, 0]),
        ("weights_0", [0, 1]),
        ("weights_0", [0.5, 1.0]),
        ("vocab_sha256", [0.5]),
    ],
)
def test_tables_whose_arrays_do_not_fit_are_refused(
    tokenizer: Tokenizer, tmp_path: Path, name: str, values: list[float]
) -> None:
    save_tables(small(tokenizer), tmp_path)
    with np.load(tmp_path / FILE) as arrays:
        changed = dict(arrays) | ({name: np.array(values)} if values else {})
    if not values:
        del changed[name]
    np.savez(tmp_path / FILE, **changed)
    assert "holds no token statistics" in refusal(tmp_path, tokenizer)
