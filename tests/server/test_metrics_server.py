"""The metrics of a real server: its metrics port shows what its requests did."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher import free_ports
from launcher.server import Server
from tests.server.conftest import deployment, serving
from tests.support.clients import ask, generate, metric, until
from tests.support.otlp import collector, plain
from tests.support.series import MONITORING, board_expressions, read_names
from tests.support.without_triton import imported

pytestmark = pytest.mark.server

PROMPT = "the quick brown fox jumps over the lazy dog the quick"
INPUTS: dict[str, Any] = {"text_input": PROMPT, "max_tokens": 24, "end_id": -1, "stream": True}


def test_a_request_is_counted_with_what_its_client_saw(server: Server) -> None:
    def value(name: str, **labels: str) -> float:
        return metric(server.metrics_url, name, model="speculative", **labels)

    names = {"spec_steps_total": "suffix", "spec_generation_tokens_total": "suffix"}
    ask(server.grpc_url, speculation="suffix", **INPUTS)
    until(lambda: _known(server, "spec_steps_total", method="suffix"), "the first figures of the method")
    time.sleep(1.5)  # the metrics of one request are shown family by family
    before = {name: value(name, method=method) for name, method in names.items()}
    num_first = value("spec_time_to_first_token_seconds_count")
    num_chunks = value("spec_inter_chunk_latency_seconds_count")
    answer = ask(server.grpc_url, speculation="suffix", **INPUTS)
    until(lambda: value("spec_time_to_first_token_seconds_count") > num_first, "the figures of the request")
    assert value("spec_generation_tokens_total", method="suffix") == before["spec_generation_tokens_total"] + 24
    assert value("spec_steps_total", method="suffix") == before["spec_steps_total"] + answer.last["num_steps"]
    # The launcher's own probe of one token may have come between.
    assert value("spec_inter_chunk_latency_seconds_count") == num_chunks + len(answer.parts) - 1
    assert num_first + 1 <= value("spec_time_to_first_token_seconds_bucket", le="+Inf") <= num_first + 2
    until(lambda: value("spec_num_requests_running") == value("spec_num_requests_waiting") == 0, "the end")
    assert value("spec_max_requests_running") == 32


def test_a_text_that_another_server_began_counts_with_the_tokens_of_this_one(server: Server) -> None:
    def value(name: str, **labels: str) -> float:
        return metric(server.metrics_url, name, model="speculative", **labels)

    whole = ask(server.grpc_url, speculation="suffix", **INPUTS)
    until(lambda: _known(server, "spec_steps_total", method="suffix"), "the first figures of the method")
    time.sleep(1.5)  # the metrics of one request are shown family by family
    num_ended = value("spec_e2e_request_latency_seconds_count")
    num_tokens = value("spec_generation_tokens_total", method="suffix")
    num_prompt, num_hits = value("spec_prompt_tokens_total"), value("spec_prefix_cache_hits_total")
    rest = ask(server.grpc_url, speculation="suffix", generated_ids=whole.ids[:20], return_stats=True, **INPUTS)
    assert rest.ids == whole.ids[20:]
    until(lambda: value("spec_e2e_request_latency_seconds_count") == num_ended + 1, "the figures of the request")
    time.sleep(1.5)
    assert value("spec_generation_tokens_total", method="suffix") == num_tokens + 4
    assert value("spec_prefix_cache_hits_total") == num_hits + rest.stats["num_cached_tokens"]
    assert 0 < rest.stats["num_cached_tokens"] <= value("spec_prompt_tokens_total") - num_prompt


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
        labels = {"model": model, "engine": "torch", "kernels": "native", "dtype": "float32", "device": "cpu"}
        assert metric(server.metrics_url, "spec_engine_info", **labels) == 1
    until(lambda: metric(server.metrics_url, "spec_pass_seconds_total", model="target") > 0, "the time of a pass")
    assert 0 <= metric(server.metrics_url, "spec_kv_cache_usage_ratio", model="target") <= 1


def _known(server: Server, name: str, **labels: str) -> bool:
    try:
        metric(server.metrics_url, name, **labels)
    except AssertionError:
        return False
    return True


def names_on(server: Server) -> set[str]:
    """Return the names of the series on the metrics port."""
    with urllib.request.urlopen(server.metrics_url, timeout=10) as response:
        return set(re.findall(r"^(spec_\w+)", response.read().decode(), re.MULTILINE))


@pytest.fixture
def used(server: Server) -> Server:
    """The server after requests that make every series appear, with and without a drafter."""
    for method in ("none", "suffix", "draft_model"):
        ask(server.grpc_url, speculation=method, **INPUTS)
        until(lambda method=method: _known(server, "spec_steps_total", method=method), f"the figures of {method}")
    until(lambda: metric(server.metrics_url, "spec_passes_total", model="target") > 0, "the figures of the engine")
    return server


def test_every_series_that_board_alerts_and_manifests_read_is_on_a_live_server(used: Server) -> None:
    wanted = {name for name in read_names() if not name.startswith("spec_gateway_")}
    assert len(wanted) > 30
    assert not wanted - names_on(used)


def test_a_family_that_is_declared_is_on_a_live_server(used: Server) -> None:
    with imported("metrics") as metrics:
        families = (*metrics.REQUEST_FAMILIES, *metrics.DRAFT_FAMILIES, *metrics.ENGINE_FAMILIES)
    assert not {name for family in families for name, _ in family.parts} - names_on(used)


@contextlib.contextmanager
def prometheus(server: Server, folder: Path) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    """Run Prometheus with our rules over the server; yield a function that asks it."""
    port = free_ports().http
    config = (MONITORING / "prometheus.yml").read_text().replace("15s", "1s")
    metrics_address = urllib.parse.urlsplit(server.metrics_url).netloc
    (folder / "prometheus.yml").write_text(config.replace("server:8002", metrics_address))
    (folder / "alerts.yml").write_text((MONITORING / "alerts.yml").read_text())
    command = [
        *("prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"),
        f"--web.listen-address=127.0.0.1:{port}",
    ]

    def ask_prometheus(expression: str) -> list[dict[str, Any]]:
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{query}", timeout=10) as response:
            found: list[dict[str, Any]] = json.load(response)["data"]["result"]
        return found

    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            until(lambda: _answers(ask_prometheus), "Prometheus")
            yield ask_prometheus
        finally:
            process.terminate()
            process.wait(30)


def _answers(ask_prometheus: Callable[[str], list[dict[str, Any]]]) -> bool:
    try:
        return bool(ask_prometheus('up{job="specserve"} == 1'))
    except OSError:
        return False


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is missing (apt-get install prometheus)")
def test_prometheus_scrapes_the_server_and_every_panel_of_the_board_has_data(used: Server, tmp_path: Path) -> None:
    with prometheus(used, tmp_path) as ask_prometheus:
        names = {"spec_steps_total", "spec_time_to_first_token_seconds_bucket", "spec_engine_info"}
        for name in names:
            until(lambda name=name: ask_prometheus(name), name)
        before = ask_prometheus("sum(spec_generation_tokens_total)")[0]["value"][1]
        ask(used.grpc_url, speculation="draft_model", **INPUTS)
        until(lambda: ask_prometheus("sum(spec_generation_tokens_total)")[0]["value"][1] != before, "the request")
        quantile = "histogram_quantile(0.5, sum by (le) (spec_time_to_first_token_seconds_bucket))"
        assert 0 < float(ask_prometheus(quantile)[0]["value"][1]) <= 30
        empty = [text for text in board_expressions() if "spec_gateway" not in text and not ask_prometheus(text)]
        assert not empty
        assert not ask_prometheus('ALERTS{alertstate="firing",severity="critical",alertname!="SpecReplicaDown"}')


def test_a_server_with_a_collector_sends_a_span_for_each_text(linked: Path) -> None:
    with collector() as (address, received):
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": address, "OTEL_BSP_SCHEDULE_DELAY": "100"}
        with serving(deployment(linked), env=environ, log_level="info") as running:
            assert re.search(r" INFO target runtime\S+: .*: torch forward pass, ", running.log())
            answer = ask(running.grpc_url, speculation="suffix", **INPUTS)
            until(lambda: received, "the span")
    ((_, span),) = received
    found = {entry.key: plain(entry.value) for entry in span.attributes}
    assert found["spec.method"] == "suffix" and found["gen_ai.usage.output_tokens"] == 24
    assert found["spec.steps"] == answer.last["num_steps"] and found["spec.request_id"] == "r"
    assert len([event for event in span.events if event.name == "response"]) == len(answer.parts)
