"""A tiny target, and the stock model over the same checkpoint, for the tests of the engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.stock_model import StockModel
from tests.support.tiny_models import make_tiny_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def plain(folder: Path) -> StockModel:
    return StockModel(folder)
