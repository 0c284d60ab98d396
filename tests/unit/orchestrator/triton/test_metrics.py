"""Figures on the metrics port: counters grow by what is new, and a port that fails disturbs nobody."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from orchestrator.core.types import EngineStatus
from orchestrator.triton.breaker import DraftCounts
from tests.support.without_triton import imported


class Port:
    """Adds up what is shown; stands for a family and for its series at once."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], int] = {}
        self.num_calls = 0
        self.fails = False

    def family(self, name: str, kind: str, description: str) -> Any:
        port = self

        class Series:
            def __init__(self, labels: dict[str, str]) -> None:
                self.key = (name, *labels.values())

            def increment(self, value: int) -> None:
                assert (kind == "counter" and value > 0) or self.key not in port.values
                self._note(port.values.get(self.key, 0) + value)

            def set(self, value: int) -> None:
                assert kind == "gauge"
                self._note(value)

            def _note(self, value: int) -> None:
                port.num_calls += 1
                if port.fails:
                    raise RuntimeError("the port is gone")
                port.values[self.key] = value

        class Family:
            Metric = Series

        return Family


@pytest.fixture
def port() -> Port:
    return Port()


@pytest.fixture
def metrics(port: Port, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with imported("metrics") as module:
        monkeypatch.setattr(module.pb, "metric_family", port.family)
        yield module


def test_draft_counts_are_shown(metrics: ModuleType, port: Port) -> None:
    """They used to be counted, and shown nowhere."""
    figures = metrics.Figures(metrics.DRAFT_FAMILIES, model="speculative", drafter="eagle")
    counts = DraftCounts(num_calls=7, num_late=2, num_failed=1, num_skipped=4)
    figures.show(metrics.draft_figures(counts))
    counts.num_calls += 3
    figures.show(metrics.draft_figures(counts))
    shown = {name: value for (name, *_), value in port.values.items()}
    assert shown == {
        "spec_draft_calls_total": 10, "spec_draft_late_total": 2, "spec_draft_failed_total": 1,
        "spec_draft_skipped_total": 4,
    }  # fmt: skip
    assert {labels for (_, *labels) in map(tuple, port.values) for labels in [tuple(labels)]} == {
        ("speculative", "eagle")
    }


def test_values_that_have_not_changed_are_not_sent_again(metrics: ModuleType, port: Port) -> None:
    figures = metrics.Figures(metrics.ENGINE_FAMILIES, model="target")
    status = EngineStatus(1, 2, 3, 6, 4, 5, 9)
    figures.show(metrics.engine_figures(status))
    assert port.values["spec_kv_blocks", "target", "total"] == 6 and port.values["spec_passes_total", "target"] == 5
    before = port.num_calls
    figures.show(metrics.engine_figures(status))
    assert port.num_calls == before


def test_a_port_that_fails_is_left_alone(metrics: ModuleType, port: Port) -> None:
    figures = metrics.Figures(metrics.DRAFT_FAMILIES, model="speculative", drafter="eagle")
    port.fails = True
    for _ in range(3):
        figures.show(metrics.draft_figures(DraftCounts(num_calls=1)))
    assert port.num_calls == 1
