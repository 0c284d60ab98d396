"""A tiny target, and the stock model over the same checkpoint, for the tests of the engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.stock_model import StockModel
from native import library
from native.compiling import Unbuilt
from tests.support.tiny_models import make_tiny_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def native_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target for native code; skips where that cannot be built."""
    try:
        library.load()
    except Unbuilt as error:
        pytest.skip(str(error))
    sizes = {"hidden_size": 64, "intermediate_size": 80, "head_dim": 16, "initializer_range": 0.2}
    return make_tiny_target(tmp_path_factory.mktemp("native"), **sizes)


@pytest.fixture(scope="module")
def plain(folder: Path) -> StockModel:
    return StockModel(folder)
