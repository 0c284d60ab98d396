"""Corpora of the heads: documents, lines of JSON, what is held out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from build.errors import BuildError
from build.heads.text import heads_text, read_corpus
from build.workspace import Workspace
from tests.support.heads_training import write_corpus


def test_jsonl_lines_are_documents_of_what_their_keys_hold(tmp_path: Path):
    lines = [
        {"text": "plain"},
        {"messages": [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "answer"}]},
        {"conversations": [{"from": "human", "value": "ask"}]},
        {"prompt": "one", "completion": "two"},
    ]
    file = tmp_path / "some.jsonl"
    file.write_text("\n\n".join(json.dumps(line) for line in lines))
    assert [d.text for d in read_corpus(file).documents] == ["plain", "ask\nanswer", "ask", "one\ntwo"]
    assert read_corpus(tmp_path).sha256 != read_corpus(file).sha256


@pytest.mark.parametrize(
    ("line", "reason"), [("{", "line 2 cannot be read as JSON"), ('{"id": 3}', "line 2 has no text under")]
)
def test_bad_jsonl_line_is_named(tmp_path: Path, line: str, reason: str):
    file = tmp_path / "some.jsonl"
    file.write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(BuildError, match=reason):
        read_corpus(file)


def test_text_is_cut_at_line_ends_and_partly_held_out(folder: Path, tmp_path: Path):
    file = write_corpus(tmp_path)
    corpus = read_corpus(file)
    assert "".join(document.text for document in corpus.documents) == file.read_text()
    assert all(document.text.endswith("\n") for document in corpus.documents[:-1])
    text = heads_text(str(folder), str(file), Workspace(tmp_path), tmp_path / "scratch")
    again = heads_text(str(folder), str(file), Workspace(tmp_path), tmp_path / "scratch")
    assert 0 < len(text.held_out) < len(text.train)
    assert np.array_equal(text.train, again.train)
    file.write_text("too little\n")
    with pytest.raises(BuildError, match="too few to hold some out"):
        heads_text(str(folder), str(file), Workspace(tmp_path), tmp_path / "scratch")
