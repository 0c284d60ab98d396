"""Every correction of the TensorRT-LLM path can be taken back, and its test and its row in the docs are there."""

from __future__ import annotations

import re

import pytest

from tests.support.mutant import ROOT
from tests.support.trtllm_corrections import CORRECTIONS, Correction

PAGE = (ROOT / "docs/tensorrt-llm-source.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda each: each.name)
def test_correction_has_its_text_its_test_and_its_row(correction: Correction) -> None:
    assert (ROOT / correction.file).read_text(encoding="utf-8").count(correction.sound) == 1
    file, _, name = correction.test.partition("::")
    assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")
    number = correction.name.split()[0]
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {number} |"))
    assert f"`{name}`" in row


def test_every_row_of_the_docs_is_guarded() -> None:
    assert set(re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)) == {each.name.split()[0] for each in CORRECTIONS}
