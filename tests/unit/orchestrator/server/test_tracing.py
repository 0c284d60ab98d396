"""Spans of answered sequences, received as a collector receives them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from orchestrator.server.statistics import Statistics
from orchestrator.server.text import FinishReason
from tests.support.otlp import collector, plain
from tests.support.without_triton import imported


@pytest.fixture
def tracing() -> Iterator[ModuleType]:
    with imported("tracing") as module:
        yield module


def sequence(began_s: float, num_responses: int) -> Any:
    responses = [(began_s + 0.1 * at, 2) for at in range(1, num_responses + 1)]
    return SimpleNamespace(
        context=SimpleNamespace(prompt_len=10),
        output=SimpleNamespace(finish=FinishReason.STOP),
        statistics=Statistics(
            num_steps=num_responses,
            step_lengths=[2] * num_responses,
            num_draft_tokens=30,
            num_accepted_tokens=9,
            responses=responses,
        ),
    )


def attributes(span: Any) -> dict[str, Any]:
    return {entry.key: plain(entry.value) for entry in span.attributes}


def test_a_sequence_has_a_span_with_its_responses(tracing: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as (address, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        traces = tracing.Traces.from_environment("speculative")
        now_s = time.monotonic()
        traces.ended(tracing.RequestTimes(now_s - 2, now_s - 1.5), sequence(now_s - 1.5, 3), "suffix", "r-1")
        traces.ended(tracing.RequestTimes(now_s - 2, now_s - 2), sequence(now_s - 2, 1000), "eagle2", "")
        traces.close()
    (resource, span), (_, longer) = received
    assert resource["service.name"] == "specserve"
    assert span.name == "generate" and attributes(span)["spec.method"] == "suffix"
    assert attributes(span)["gen_ai.usage.output_tokens"] == 6
    assert attributes(span)["spec.request_id"] == "r-1"
    assert attributes(span)["gen_ai.response.finish_reasons"] == ["stop"]
    assert [event.name for event in span.events] == ["start", "response", "response", "response"]
    begin_ns = span.start_time_unix_nano
    at_s = [(event.time_unix_nano - begin_ns) / 1e9 for event in span.events]
    assert at_s == pytest.approx([0.5, 0.6, 0.7, 0.8], abs=1e-3)
    assert abs(begin_ns / 1e9 - (time.time() - 2)) < 60 and span.end_time_unix_nano > begin_ns
    shown = [event for event in longer.events if event.name == "response"]
    assert 1 < len(shown) <= tracing.MAX_RESPONSES
    indices = [plain(entry.value) for event in shown for entry in event.attributes if entry.key == "index"]
    assert indices == list(range(0, 1000, 16))


def test_traces_are_off_unless_an_endpoint_is_set(tracing: ModuleType) -> None:
    assert tracing.Traces.from_environment("speculative", {}) is None


def test_without_opentelemetry_an_endpoint_costs_a_warning_with_what_to_install(
    tracing: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Clusters set the endpoint for all their containers, so the server must start."""
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}
    assert tracing.Traces.from_environment("speculative", environ) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "OTEL_EXPORTER_OTLP_ENDPOINT is set: pip install 'specserve[otel]'" in record.getMessage()
