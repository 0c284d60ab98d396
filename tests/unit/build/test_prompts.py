"""The committed prompts, the excerpts that they are made of, and the size check of the model folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from build import sizes
from build.corpus import Document
from build.excerpts import Excerpt
from build.prompts import MAX_TOTAL_BYTES, PROMPTS, TASKS, Task
from build.tokenizer import load_tokenizer

MODELS = sizes.MODELS


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


def models_folder(root: Path, **num_bytes: int) -> Path:
    for name, size in num_bytes.items():
        (root / name).mkdir()
        (root / name / "model.safetensors").write_bytes(b"\0" * size)
    return root


@pytest.mark.parametrize(("name", "remark"), [("draft", "too large"), ("unknown", "no ceiling")])
def test_sizes_beyond_a_ceiling_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, remark: str):
    with pytest.raises(SystemExit) as stopped:
        sizes.main(models_folder(tmp_path, **{name: 2 * sizes.MIB + 1}))
    assert stopped.value.code == 1
    assert remark in capsys.readouterr().out
