"""What a public model counts of its requests: the figures of known sequences, added up and shown as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from orchestrator.core.errors import Draining, EngineError, RequestError, SaltQueueFull, Unavailable
from orchestrator.server.statistics import SourceCount, Statistics
from orchestrator.server.text import FinishReason
from tests.support.clients import until
from tests.support.metrics_port import MetricsPort
from tests.support.without_triton import imported


@pytest.fixture
def port() -> MetricsPort:
    return MetricsPort()


@pytest.fixture
def module(port: MetricsPort, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with imported("request_metrics") as found:
        monkeypatch.setattr(found, "REPORT_S", 3600.0)
        with imported("metrics") as metrics:
            monkeypatch.setattr(metrics.pb, "metric_family", port.family)
        yield found


@pytest.fixture
def metrics(module: ModuleType) -> Iterator[Any]:
    made = module.RequestMetrics("speculative", lambda: {"spec_num_requests_running": 3.0})
    yield made
    made.close()


def sequence(finish: FinishReason = FinishReason.LENGTH) -> Any:
    """A prompt of 10 tokens, 4 of them cached, and 7 tokens of output: 1 after the prefill, then 2, 3 and 1.

    They continue a text of 100 tokens from another server.
    """
    statistics = Statistics(
        num_steps=4,
        draft_s=0.1,
        target_s=0.4,
        num_cached_tokens=4,
        step_lengths=[1, 2, 3, 1],
        sources={"suffix.text": SourceCount(9, 3), "suffix.memory": SourceCount(1, 0)},
        tested=[3, 2],
        accepted=[2, 1],
        responses=[(100.5, 1), (100.7, 2), (101.0, 3), (101.1, 1)],
    )
    return SimpleNamespace(
        context=SimpleNamespace(prompt_len=10),
        output=SimpleNamespace(num_tokens=107, finish=finish),
        statistics=statistics,
    )


def shown(port: MetricsPort, name: str) -> dict[str, float]:
    """Return the series of a family by their labels, without the model."""
    found = {}
    for key, value in port.values.items():
        family, _, labels = key.partition("{")
        if family == name:
            found[labels.rstrip("}").replace('model="speculative"', "").strip(",").replace(",,", ",")] = value
    return found


def test_a_sequence_is_counted_as_it_was(module: ModuleType, metrics: Any, port: MetricsPort) -> None:
    metrics.ended(module.RequestTimes(100.0, 100.25), sequence(), "suffix")
    metrics.report()
    assert shown(port, "spec_num_requests_running") == {"": 3}
    assert shown(port, "spec_request_success_total") == {
        f'finished_reason="{reason.value}"': float(reason is FinishReason.LENGTH) for reason in FinishReason
    }
    assert shown(port, "spec_prompt_tokens_total") == {"": 10}
    assert shown(port, "spec_prefix_cache_hits_total") == {"": 4}
    assert shown(port, "spec_generation_tokens_total") == {'method="suffix"': 7}
    assert shown(port, "spec_steps_total") == {'method="suffix"': 4}
    assert shown(port, "spec_draft_tokens_total") == {
        'method="suffix",source="suffix.text"': 9,
        'method="suffix",source="suffix.memory"': 1,
    }
    assert shown(port, "spec_accepted_per_position_total") == {
        'method="suffix",position="1"': 2,
        'method="suffix",position="2"': 1,
    }
    times = {name: shown(port, f"spec_{name}_seconds_total") for name in ("draft", "verify", "overhead")}
    assert times == {
        "draft": {'method="suffix"': pytest.approx(0.1)},
        "verify": {'method="suffix"': pytest.approx(0.4)},
        "overhead": {'method="suffix"': pytest.approx(0.1)},
    }


def test_times_are_histograms_with_cumulative_buckets(module: ModuleType, metrics: Any, port: MetricsPort) -> None:
    metrics.ended(module.RequestTimes(100.0, 100.25), sequence(), "suffix")
    metrics.report()
    sums = {
        "spec_request_queue_time_seconds": (0.25, 1),
        "spec_time_to_first_token_seconds": (0.5, 1),
        "spec_inter_chunk_latency_seconds": (0.6, 3),
        "spec_inter_token_latency_seconds": (0.6, 6),
        "spec_e2e_request_latency_seconds": (1.1, 1),
        "spec_request_prompt_tokens": (10, 1),
        "spec_request_generation_tokens": (7, 1),
    }
    for name, (total, count) in sums.items():
        assert shown(port, f"{name}_sum") == {"": pytest.approx(total)}, name
        assert shown(port, f"{name}_count") == {"": count}, name
    # tokens of 0.1 s: 2 after 0.2 s, 3 after 0.3 s and 1 after 0.1 s; floating point may put them to either side of 0.1
    buckets = shown(port, "spec_inter_token_latency_seconds_bucket")
    assert buckets['le="0.075"'] == 0 and buckets['le="0.25"'] == 6 and buckets['le="+Inf"'] == 6
    assert list(buckets.values()) == sorted(buckets.values())
    assert shown(port, "spec_time_to_first_token_seconds_bucket")['le="0.5"'] == 1  # a bound belongs to its bucket
    assert shown(port, "spec_time_to_first_token_seconds_bucket")['le="0.25"'] == 0


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RequestError("x"), "invalid"),
        (Unavailable("x"), "unavailable"),
        (Draining("x"), "unavailable"),
        (SaltQueueFull("x"), "full"),
        (EngineError("x"), "error"),
        (OSError(), "error"),
    ],
)
def test_refusals_have_their_reason(
    module: ModuleType, metrics: Any, port: MetricsPort, error: Exception, reason: str
) -> None:
    metrics.refused(module.reason_of(error))
    metrics.report()
    assert shown(port, "spec_request_refused_total") == {
        f'reason="{known}"': float(known == reason) for known in module.REFUSALS
    }


def test_names_that_clients_make_up_do_not_grow_the_page_without_end(
    module: ModuleType, metrics: Any, port: MetricsPort
) -> None:
    for number in range(100):
        metrics.ended(module.RequestTimes(100.0, 100.0), sequence(), f"method{number}")
    metrics.report()
    methods = shown(port, "spec_steps_total")
    assert len(methods) == module.MAX_NAMES + 1 and methods['method="other"'] == 4 * (100 - module.MAX_NAMES)


def test_a_report_that_fails_is_followed_by_others(
    module: ModuleType, port: MetricsPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REPORT_S", 0.01)
    reports = iter([OSError("too many open files"), None])

    def gauges() -> dict[str, float]:
        if error := next(reports, None):
            raise error
        return {"spec_num_requests_running": 7.0}

    metrics = module.RequestMetrics("speculative", gauges)
    until(lambda: shown(port, "spec_num_requests_running") == {"": 7}, "a report after one that failed")
    metrics.close()
