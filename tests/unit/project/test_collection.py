"""Every test file is collected: pytest passes over some folder names without a word, `build` among them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from launcher.settings import Settings
from tests.server import conftest as servers

TESTS = Path(__file__).parents[2]

pytestmark = pytest.mark.unit


def test_pytest_enters_every_folder_that_has_tests(pytestconfig: pytest.Config) -> None:
    patterns = pytestconfig.getini("norecursedirs")
    folders = {folder for file in TESTS.rglob("test_*.py") for folder in file.relative_to(TESTS).parents}
    named = [folder for folder in folders if folder.name]
    assert len(named) > 10
    assert not [folder for folder in named for pattern in patterns if Path(folder.name).match(pattern)]


def test_hypothesis_times_no_test() -> None:
    assert settings().deadline is None and HealthCheck.too_slow in settings().suppress_health_check


def test_a_test_may_wait_for_its_server_as_long_as_the_launcher_does() -> None:
    class Item:
        def __init__(self, path: Path, own: str) -> None:
            self.path, self.own, self.marks = path, own, list[pytest.MarkDecorator]()

        def get_closest_marker(self, name: str) -> str | None:
            return name if name == self.own else None

        def add_marker(self, mark: pytest.MarkDecorator) -> None:
            self.marks.append(mark)

    items = [
        Item(TESTS / "server/test_a.py", "server"),
        Item(TESTS / "server/test_b.py", "timeout"),
        Item(TESTS / "unit/test_c.py", ""),
    ]
    servers.pytest_collection_modifyitems(items)
    assert [[(mark.name, *mark.args) for mark in item.marks] for item in items] == [
        [("timeout", servers.TEST_LIMIT_S)], [], [],
    ]  # fmt: skip
    assert Settings().ready_limit_s < servers.TEST_LIMIT_S
