"""Every test file is collected: pytest passes over some folder names without a word, `build` among them."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]

pytestmark = pytest.mark.unit


def test_pytest_enters_every_folder_that_has_tests(pytestconfig: pytest.Config) -> None:
    patterns = pytestconfig.getini("norecursedirs")
    folders = {folder for file in TESTS.rglob("test_*.py") for folder in file.relative_to(TESTS).parents}
    named = [folder for folder in folders if folder.name]
    assert len(named) > 10
    assert not [folder for folder in named for pattern in patterns if Path(folder.name).match(pattern)]
