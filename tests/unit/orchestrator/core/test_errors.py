"""Errors as text: class and message survive the way over Triton."""

from __future__ import annotations

import pytest

from orchestrator.core.errors import (
    ConfigError,
    Draining,
    EngineError,
    EngineLost,
    RequestError,
    ServingError,
    Unavailable,
    UnknownSequence,
    error_from,
    error_text,
)


@pytest.mark.parametrize("kind", [UnknownSequence, Draining, Unavailable, RequestError, EngineLost, EngineError])
@pytest.mark.parametrize("words", ["the reason", "a: b: c", "engine: twice", "request: other", "two\nlines", ""])
def test_error_keeps_its_class_and_message(kind: type[ServingError], words: str) -> None:
    back = error_from(error_text(kind(words)))
    assert type(back) is kind
    assert str(back) == words


def test_error_of_another_class_keeps_its_message() -> None:
    back = error_from(error_text(ConfigError("no such device")))
    assert type(back) is EngineError and str(back) == "no such device"


@pytest.mark.parametrize("text", ["Stub process is not healthy.", "Failed: no model", "", "engines: x"])
def test_text_of_triton_means_that_the_engine_is_lost(text: str) -> None:
    assert type(error_from(text)) is EngineLost
    assert str(error_from(text)) == text
