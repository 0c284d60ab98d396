"""Counting n-grams: the numbers of a naive count, the limits, and the shipped tables."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from build import ngrams
from build.errors import BuildError, run_command
from build.ngrams import Limits, count_tables, files_text, publish
from build.sizes import CEILINGS_MIB, MIB
from build.tokenizer import load_tokenizer
from orchestrator.drafting.tables import FILE, MAX_ORDER, VocabularyFingerprint, load_tables
from tests.support.tiny_models import write_byte_tokenizer

MODELS = Path(ngrams.MODELS)
EVERYTHING = Limits(1, 10**6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


def naive(documents: list[list[int]], size: int) -> dict[tuple[int, ...], Counter[int]]:
    """The truth: {context: followers}, document by document."""
    found: dict[tuple[int, ...], Counter[int]] = {}
    for ids in documents:
        for end in range(size, len(ids)):
            found.setdefault(tuple(ids[end - size : end]), Counter())[ids[end]] += 1
    return found


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=40), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(1, 20),
)
def test_counts_are_those_of_a_naive_count(
    tokenizer: Tokenizer, documents: list[list[int]], min_count: int, max_contexts: int
) -> None:
    arrays = [np.array(ids, np.int64) for ids in documents]
    tables = count_tables(arrays, tokenizer, MAX_ORDER, Limits(min_count, max_contexts))
    assert len(tables.levels) == MAX_ORDER
    for size in range(MAX_ORDER):
        truth = {
            context: Counter({t: n for t, n in f.items() if n >= min_count})
            for context, f in naive(documents, size).items()
        }
        totals = sorted((-followers.total(), context) for context, followers in truth.items() if followers)
        kept = {context for _, context in totals[:max_contexts]}
        assert len(tables.levels[size].keys) == len(kept)
        for context in truth:
            followers = tables.followers(context)
            assert (followers is not None) == (context in kept)
            if followers:
                assert dict(zip(followers.ids.tolist(), followers.weights.tolist(), strict=True)) == truth[context]


def test_counts_of_too_little_text_and_too_large_a_vocabulary_are_errors(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BuildError, match="nothing to count"):
        count_tables([np.array([1, 2])], tokenizer, 3, EVERYTHING)
    monkeypatch.setattr(ngrams, "vocabulary_of", lambda tokenizer: VocabularyFingerprint(1 << 22, "0" * 64))
    with pytest.raises(BuildError, match="too large for n-grams of order 4"):
        count_tables([np.array([1, 2, 3, 4])], tokenizer, 4, EVERYTHING)


def test_published_tables_load_and_say_how_they_were_made(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcabcabd")
    (tmp_path / "b.txt").write_text("abc")
    text = files_text([tmp_path / "a.txt", tmp_path / "b.txt"])
    publish(text, tokenizer, 3, EVERYTHING, tmp_path / "out")
    tables = load_tables(tmp_path / "out", tokenizer)
    a, b, c, d = tokenizer.encode("abcd").ids
    followers = tables.followers([a, b])
    assert followers and dict(zip(followers.ids.tolist(), followers.weights.tolist(), strict=True)) == {c: 3, d: 1}
    made = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert (made["script"], made["order"], made["min_count"], made["tokens"]) == ("build/ngrams.py", 3, 1, 12)
    assert made["corpus"]["files"] == 2 and len(made["corpus"]["sha256"]) == 64
    assert made["vocabulary"]["size"] == 63
    assert str(tmp_path) not in json.dumps(made)


def test_command_line_counts_the_files_that_it_is_given(
    folder: Path,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "a.txt").write_text("abab" * 5)
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    arguments = ["--tokenizer", str(folder), "--order", "2", "--min-count", "3", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["ngrams", *arguments, str(tmp_path / "a.txt")])
    ngrams.main()
    assert load_tables(tmp_path / "out", tokenizer).followers([1])
    monkeypatch.setattr(sys, "argv", ["ngrams", *arguments, str(tmp_path / "bytes.txt")])
    with pytest.raises(SystemExit) as stopped:
        run_command(ngrams.main)
    assert stopped.value.code == 2
    assert "cannot be read as UTF-8 text" in capsys.readouterr().err


def test_shipped_tables_fit_the_demo_target_and_their_ceiling() -> None:
    tables = load_tables(MODELS / "ngram", load_tokenizer(MODELS / "target"))
    made = json.loads((MODELS / "ngram" / "provenance.json").read_text())
    assert made["order"] == len(tables.levels) == 4
    assert made["contexts"] == [len(level.keys) for level in tables.levels]
    assert (
        made["corpus"]["sha256"] == json.loads((MODELS / "target" / "provenance.json").read_text())["corpus"]["sha256"]
    )
    assert (MODELS / "ngram" / FILE).stat().st_size < CEILINGS_MIB["ngram"] * MIB
