"""The corpus: what is read, how it is split, and that a differing one is refused; the tokenizer beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from build.corpus import MAX_FILE_BYTES, Corpus, check_corpus, load_corpus
from build.data import encode_documents
from build.errors import run_command
from build.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer


def library(root: Path, num_files: int = 200) -> Path:
    """A small library with files that belong in the corpus and files that do not."""
    for number in range(num_files):
        path = root / f"package{number % 7}" / f"module{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"def f{number}(x):\n    return x + {number}\n")
    (root / "site-packages").mkdir()
    (root / "site-packages" / "other.py").write_text("x = 1\n")
    (root / "_sysconfigdata_x.py").write_text("x = 1\n")
    (root / "large.py").write_text("#" * (MAX_FILE_BYTES + 1))
    (root / "latin.py").write_bytes(b"# \xe9\n")
    return root


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return load_corpus(library(tmp_path_factory.mktemp("library")))


def test_corpus_of_a_library_leaves_out_what_does_not_belong(corpus: Corpus):
    assert len(corpus.documents) == 200
    assert all(document.path.startswith("package") for document in corpus.documents)


def test_split_is_disjoint_complete_and_about_four_percent(corpus: Corpus):
    train, held_out = ({document.path for document in part} for part in (corpus.train, corpus.held_out))
    assert not train & held_out
    assert len(train) + len(held_out) == 200
    assert 1 <= len(held_out) <= 20


def test_hash_of_a_changed_file_differs_and_no_file_changes_sides(corpus: Corpus, tmp_path: Path):
    root = library(tmp_path)
    (root / "package0" / "module0.py").write_text("changed = True\n")
    changed = load_corpus(root)
    assert changed.sha256 != corpus.sha256
    assert [document.path for document in changed.held_out] == [document.path for document in corpus.held_out]


def test_differing_corpus_is_refused_in_one_sentence_unless_any_is_allowed(
    corpus: Corpus, capsys: pytest.CaptureFixture[str]
):
    check_corpus(corpus, None, any_corpus=False)
    check_corpus(corpus, corpus.sha256, any_corpus=False)
    check_corpus(corpus, "0" * 64, any_corpus=True)
    with pytest.raises(SystemExit) as stopped:
        run_command(lambda: check_corpus(corpus, "0" * 64, any_corpus=False))
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert "--any-corpus" in message
    assert message.count("\n") == 1


def test_tokenizer_saved_loads_both_ways_and_loses_no_byte(corpus: Corpus, tmp_path: Path):
    save_tokenizer(train_tokenizer(document.text for document in corpus.train), tmp_path)
    text = "def f(x):\n\treturn  'é', x  # 漢\n"
    for_transformers, plain = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    ids = plain.encode(text).ids
    assert for_transformers(text)["input_ids"] == ids
    assert plain.decode(ids) == text
    assert (for_transformers.bos_token_id, for_transformers.eos_token_id, for_transformers.pad_token_id) == (0, 0, 0)
    stream = encode_documents(plain, corpus.held_out)
    assert (stream == 0).sum() == len(corpus.held_out) + 1
