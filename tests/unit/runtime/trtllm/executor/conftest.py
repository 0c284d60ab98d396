"""The stand-in for tensorrt_llm on sys.path, and engines of the tiny models for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.core.messages.target import StepRequest
from orchestrator.core.sampling_params import Sampling
from runtime.trtllm.client import TrtllmClient
from tests.standin import importable
from tests.standin.engine_folder import make_engine
from tests.support.decode import decode
from tests.support.engines import EngineTarget, make_paged, start_target
from tests.support.executor import LIMITS, PROMPT, proposer_of, serving
from tests.support.tiny_models import make_tiny_target


@pytest.fixture(scope="package", autouse=True)
def library() -> Iterator[None]:
    with importable():
        yield


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="package")
def draft_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("draft"), seed=1, num_hidden_layers=1)


@pytest.fixture(scope="package")
def greedy(checkpoint: Path) -> list[int]:
    """The text of our own engine."""
    engine = start_target(make_paged(checkpoint))
    text, _ = decode(EngineTarget(engine, 1), proposer_of("none"), PROMPT, Sampling(), LIMITS)
    engine.close()
    return text


@pytest.fixture(scope="package")
def folder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engine(tmp_path_factory.mktemp("engines") / "target", checkpoint)


@pytest.fixture
def client(folder: Path) -> Iterator[TrtllmClient[StepRequest]]:
    with serving(folder) as engine:
        yield engine
