"""A tiny random target, and measurements that are short."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from build.heads import measure as measure_module
from build.heads import publish
from build.heads import text as text_module
from build.heads.target import FrozenTarget, load_target
from tests.support.tiny_models import make_tiny_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("target"), num_hidden_layers=7, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def target(folder: Path) -> FrozenTarget:
    return load_target(str(folder), "cpu", reads_layers=True)


@pytest.fixture(scope="module", autouse=True)
def short_measurements() -> Iterator[None]:
    """Heads that were hardly trained need no precise numbers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publish, "MEASURED_WINDOWS", 4)
        patch.setattr(measure_module, "WINDOW", 48)
        patch.setattr(measure_module, "PROMPT_TOKENS", 8)
        patch.setattr(measure_module, "GREEDY_TOKENS", 24)
        patch.setattr(text_module, "DOCUMENT_CHARS", 1_000)
        yield
