"""The metrics port: counters grow by what is new, a port that fails disturbs nobody, and the page names every family."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from orchestrator.core.deployment.config import ServingConfig
from orchestrator.core.types import DraftCounts, EngineStatus
from tests.support.metrics_port import MetricsPort
from tests.support.without_triton import imported

PAGE = Path(__file__).resolve().parents[4] / "docs/metrics.md"


@pytest.fixture
def port() -> MetricsPort:
    return MetricsPort()


@pytest.fixture
def metrics(port: MetricsPort, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with imported("metrics") as module:
        monkeypatch.setattr(module.pb, "metric_family", port.family)
        yield module


def test_draft_counts_are_shown(metrics: ModuleType, port: MetricsPort) -> None:
    shown = metrics.MetricsExporter(metrics.DRAFT_FAMILIES, model="speculative", drafter="eagle")
    counts = DraftCounts(num_calls=7, num_late=2, num_failed=1, num_skipped=4)
    shown.show(metrics.draft_values(counts, is_open=True))
    counts.num_calls += 3
    shown.show(metrics.draft_values(counts, is_open=False))
    labels = 'drafter="eagle",model="speculative"'
    assert port.values == {
        f"spec_draft_calls_total{{{labels}}}": 10,
        f"spec_draft_late_total{{{labels}}}": 2,
        f"spec_draft_failed_total{{{labels}}}": 1,
        f"spec_draft_skipped_total{{{labels}}}": 4,
        f"spec_draft_breaker_open{{{labels}}}": 0,
    }


def test_engine_shows_its_status_and_what_computes(metrics: ModuleType, port: MetricsPort) -> None:
    shown = metrics.MetricsExporter(metrics.ENGINE_FAMILIES, model="target")
    shown.show(metrics.info_values(ServingConfig(target="t"), "native"))
    shown.show(metrics.engine_values(EngineStatus(1, 2, 3, 6, 4, 5, 9, 0.25)))
    assert port.values == {
        'spec_engine_info{device="cpu",dtype="float32",engine="torch",kernels="native",model="target"}': 1,
        'spec_kv_blocks{model="target",state="held"}': 1,
        'spec_kv_blocks{model="target",state="cached"}': 2,
        'spec_kv_blocks{model="target",state="free"}': 3,
        'spec_kv_blocks{model="target",state="total"}': 6,
        'spec_kv_cache_usage_ratio{model="target"}': 1 / 6,
        'spec_sequences{model="target"}': 4,
        'spec_passes_total{model="target"}': 5,
        'spec_pass_requests_total{model="target"}': 9,
        'spec_pass_seconds_total{model="target"}': 0.25,
        'spec_preemptions_total{model="target"}': 0,
    }


def test_a_port_that_fails_is_left_alone(metrics: ModuleType, port: MetricsPort) -> None:
    shown = metrics.MetricsExporter(metrics.DRAFT_FAMILIES, model="speculative", drafter="eagle")
    port.fails = True
    for _ in range(3):
        shown.show(metrics.draft_values(DraftCounts(num_calls=1), is_open=False))
    assert port.num_calls == 1


def test_every_family_is_on_the_page_with_its_kind_and_the_page_names_no_other(metrics: ModuleType) -> None:
    families = (*metrics.REQUEST_FAMILIES, *metrics.DRAFT_FAMILIES, *metrics.ENGINE_FAMILIES)
    rows = re.findall(r"^\| (`spec_.*?`) \| (\w+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    described = {name: kind for names, kind in rows for name in re.findall(r"`(spec_\w+)(?:\{.*?\})?`", names)}
    assert described == {family.name: family.kind for family in families}
