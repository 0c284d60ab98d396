"""The committed prompts, the excerpts that they are made of, and the size check of the model folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from build import sizes
from build.corpus import Document
from build.edit_prompts import edits
from build.excerpts import Excerpt, Length, completions, docstrings, repetitions
from build.prompts import MAX_TOTAL_BYTES, PROMPTS, TASKS, Task
from build.tokenizer import load_tokenizer

MODELS = sizes.MODELS

EXAMPLE = '''\
"""A module whose docstring goes on for a while, so that it can be
continued by a model that has seen only its first
part and has to guess the rest of the
sentence.
"""


def mean(values, scale=1):
    result = 0
    for value in values:
        result += value * scale
    return result / max(result, 1)


TABLE = [
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    9,
    10,
]


def last(values):
    return values[-1]
'''
DOCUMENT = Document("example.py", EXAMPLE, "")
ANY_LENGTH = Length(1, 10_000, len)


def prompts(task: Task) -> list[dict[str, str]]:
    return [json.loads(line) for line in (PROMPTS / f"{task.name}.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_prompts_of_a_task_are_held_out_whole_and_of_the_right_length(task: Task):
    tokenizer = load_tokenizer(MODELS / "target")
    lines = prompts(task)
    assert len(lines) >= 24
    assert len({line["text"] for line in lines}) == len({line["id"] for line in lines}) == len(lines)
    for line in lines:
        assert line["task"] == task.name
        assert Document(line["source"].rpartition(":")[0], "", "").held_out
        assert line["text"] == line["text"].rstrip()
        assert task.min_tokens <= len(tokenizer.encode(line["text"]).ids) <= task.max_tokens


def test_prompts_fit_their_budget_and_carry_a_notice():
    assert sum(path.stat().st_size for path in PROMPTS.iterdir()) <= MAX_TOTAL_BYTES
    notice = (PROMPTS.parent / "NOTICE").read_text()
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in notice


def texts(excerpts: list[Excerpt]) -> list[str]:
    return [excerpt.text for excerpt in excerpts]


def test_completion_ends_with_the_head_of_a_function():
    assert [text.split("\n")[-1] for text in texts(list(completions(DOCUMENT, ANY_LENGTH)))] == [
        "def mean(values, scale=1):",
        "def last(values):",
    ]


def test_edit_shows_the_function_and_the_copy_up_to_its_first_change():
    (text,) = texts(list(edits(DOCUMENT, ANY_LENGTH)))
    function, _, copy = text.partition("\n\n\n# the same with `result` renamed to `total`\n")
    assert function == "\n".join(EXAMPLE.split("\n")[7:12])
    assert copy == "def mean(values, scale=1):"


def test_repetition_stops_within_the_table():
    (excerpt,) = repetitions(DOCUMENT, ANY_LENGTH)
    assert excerpt.text.endswith("    6,\n    7,")
    assert excerpt.source == "example.py:22"


def test_docstring_stops_at_the_end_of_a_word():
    (excerpt,) = docstrings(DOCUMENT, ANY_LENGTH)
    assert excerpt.text.endswith("part and has to guess the rest of the")


def test_file_that_is_not_python_3_gives_no_excerpts():
    broken = Document("broken.py", "print 'x'\n", "")
    assert not list(completions(broken, ANY_LENGTH))


def models_folder(root: Path, **num_bytes: int) -> Path:
    for name, size in num_bytes.items():
        (root / name).mkdir()
        (root / name / "model.safetensors").write_bytes(b"\0" * size)
    return root


def test_sizes_within_the_ceilings_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / ".train").mkdir()
    (tmp_path / ".train" / "checkpoint.pt").write_bytes(b"\0" * 3 * sizes.MIB)
    with pytest.raises(SystemExit) as stopped:
        sizes.main(models_folder(tmp_path, draft=sizes.MIB))
    assert stopped.value.code == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["all", "1.00", "48.0"]


@pytest.mark.parametrize(("name", "remark"), [("draft", "too large"), ("unknown", "no ceiling")])
def test_sizes_beyond_a_ceiling_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, remark: str):
    with pytest.raises(SystemExit) as stopped:
        sizes.main(models_folder(tmp_path, **{name: 2 * sizes.MIB + 1}))
    assert stopped.value.code == 1
    assert remark in capsys.readouterr().out
