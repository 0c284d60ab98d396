"""The metrics of a real server: what its requests did is what its metrics port shows."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.server import Server
from tests.support.clients import ask, generate, metric, until

pytestmark = pytest.mark.server

PROMPT = "the quick brown fox jumps over the lazy dog the quick"
INPUTS: dict[str, Any] = {"text_input": PROMPT, "max_tokens": 24, "end_id": -1, "stream": True}


def test_a_request_is_counted_with_what_its_client_saw(server: Server) -> None:
    def value(name: str, **labels: str) -> float:
        return metric(server.metrics_url, name, model="speculative", **labels)

    names = {"spec_steps_total": "suffix", "spec_generation_tokens_total": "suffix"}
    ask(server.grpc_url, speculation="suffix", **INPUTS)
    until(lambda: _known(server, "spec_steps_total", method="suffix"), "the first figures of the method")
    before = {name: value(name, method=method) for name, method in names.items()}
    num_first = value("spec_time_to_first_token_seconds_count")
    num_chunks = value("spec_inter_chunk_latency_seconds_count")
    answer = ask(server.grpc_url, speculation="suffix", **INPUTS)
    until(lambda: value("spec_time_to_first_token_seconds_count") == num_first + 1, "the figures of the request")
    assert value("spec_generation_tokens_total", method="suffix") == before["spec_generation_tokens_total"] + 24
    assert value("spec_steps_total", method="suffix") == before["spec_steps_total"] + answer.last["num_steps"]
    assert value("spec_inter_chunk_latency_seconds_count") == num_chunks + len(answer.parts) - 1
    assert value("spec_time_to_first_token_seconds_bucket", le="+Inf") == num_first + 1
    assert value("spec_num_requests_running") == value("spec_num_requests_waiting") == 0
    assert value("spec_max_requests_running") == 32


def test_refusals_are_counted_by_their_reason(server: Server) -> None:
    def value(reason: str) -> float:
        return metric(server.metrics_url, "spec_request_refused_total", model="speculative", reason=reason)

    before = {reason: value(reason) for reason in ("invalid", "full", "error")}
    assert generate(server.http_url, {"text_input": "abc", "max_tokens": 0}).error
    assert generate(server.http_url, {"text_input": "abc", "maxtokens": 3}).error
    until(lambda: value("invalid") == before["invalid"] + 2, "both refusals")
    assert (value("full"), value("error")) == (before["full"], before["error"])


def test_engines_say_how_they_compute(server: Server) -> None:
    for model in ("target", "draft"):
        labels = {"model": model, "engine": "torch", "kernels": "torch", "dtype": "float64", "device": "cpu"}
        assert metric(server.metrics_url, "spec_engine_info", **labels) == 1
    until(lambda: metric(server.metrics_url, "spec_pass_seconds_total", model="target") > 0, "the time of a pass")
    assert 0 <= metric(server.metrics_url, "spec_kv_cache_usage_ratio", model="target") <= 1


def _known(server: Server, name: str, **labels: str) -> bool:
    try:
        metric(server.metrics_url, name, **labels)
    except AssertionError:
        return False
    return True
