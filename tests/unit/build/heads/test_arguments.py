"""Arguments of the command: what is refused, and in which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from build.errors import BuildError
from build.heads.cli import main
from build.heads.settings import kinds_named
from tests.support.heads_training import command, write_corpus


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--heads=medusa,hydra"], "unknown head 'hydra'; the heads are medusa, eagle, eagle3, redrafter"),
        (["--heads="], "unknown head"),
        (["--corpus=nowhere.txt"], "the corpus nowhere.txt does not exist"),
        (["--medusa-heads=0"], "must be positive"),
        (["--draft-vocab=65"], r"must be in 1\.\.64, got 65"),
        (["--tokens=3"], "less than a step"),
        (["--target=./nowhere"], "the target ./nowhere cannot be used"),
    ],
)
def test_bad_arguments_are_told_in_a_sentence(folder: Path, tmp_path: Path, arguments: list[str], reason: str):
    with pytest.raises(BuildError, match=reason):
        main(command(folder, write_corpus(tmp_path), tmp_path, *arguments, "--dry-run"))


def test_kinds_are_put_in_order():
    assert kinds_named(" redrafter, medusa") == ("medusa", "redrafter")
