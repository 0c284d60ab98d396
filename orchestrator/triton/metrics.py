"""Figures of a Triton model on the server's metrics port."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

from orchestrator.core.types import EngineStatus
from orchestrator.triton import pb
from orchestrator.triton.breaker import DraftCounts

#: Name of a figure → kind and description.
Families = Mapping[str, tuple[str, str]]

ENGINE_FAMILIES: Families = {
    "spec_kv_blocks": ("gauge", "KV blocks: held by sequences, cached (found by content), free, total"),
    "spec_sequences": ("gauge", "Sequences that hold KV blocks"),
    "spec_passes_total": ("counter", "Forward passes"),
    "spec_pass_requests_total": ("counter", "Requests in these passes; divided by the passes: occupancy"),
}
DRAFT_FAMILIES: Families = {
    "spec_draft_calls_total": ("counter", "Calls of a drafter"),
    "spec_draft_late_total": ("counter", "Calls of a drafter that took longer than draft_timeout_ms"),
    "spec_draft_failed_total": ("counter", "Calls of a drafter that failed"),
    "spec_draft_skipped_total": ("counter", "Calls of a drafter that were not made, because it was late or had failed"),
}

log = logging.getLogger(__name__)


class Figures:
    """The series of one owner; labels: tell them from the same series of other owners."""

    def __init__(self, families: Families, **labels: str) -> None:
        self._kinds = {name: kind for name, (kind, _) in families.items()}
        self._families = {name: pb.metric_family(name, *rest) for name, rest in families.items()}
        self._labels = labels
        self._series: dict[tuple[str, str], Any] = {}
        self._shown: dict[tuple[str, str], int] = {}
        self._is_broken = False
        self._lock = threading.Lock()

    def show(self, values: Mapping[tuple[str, str], int]) -> None:
        """Show values by (name, state), the state being one more label unless it is empty.

        A metrics port that fails is left alone, since no request may suffer from it.
        """
        with self._lock:
            if self._is_broken:
                return
            try:
                for key, value in values.items():
                    self._set(key, value)
            except Exception:
                self._is_broken = True
                log.exception("no more metrics of %s", self._labels)

    def _set(self, key: tuple[str, str], value: int) -> None:
        name, state = key
        if key not in self._series:
            labels = self._labels | ({"state": state} if state else {})
            self._series[key] = self._families[name].Metric(labels=labels)
        elif value == self._shown[key]:
            return
        if self._kinds[name] == "counter":
            self._series[key].increment(value - self._shown.get(key, 0))
        else:
            self._series[key].set(value)
        self._shown[key] = value


def engine_figures(status: EngineStatus) -> dict[tuple[str, str], int]:
    """Return what an engine shows."""
    return {
        ("spec_kv_blocks", "held"): status.blocks_held,
        ("spec_kv_blocks", "cached"): status.blocks_cached,
        ("spec_kv_blocks", "free"): status.blocks_free,
        ("spec_kv_blocks", "total"): status.blocks_total,
        ("spec_sequences", ""): status.num_sequences,
        ("spec_passes_total", ""): status.num_passes,
        ("spec_pass_requests_total", ""): status.num_calls,
    }


def draft_figures(counts: DraftCounts) -> dict[tuple[str, str], int]:
    """Return what a public model shows of its calls of one drafter."""
    return {
        ("spec_draft_calls_total", ""): counts.num_calls,
        ("spec_draft_late_total", ""): counts.num_late,
        ("spec_draft_failed_total", ""): counts.num_failed,
        ("spec_draft_skipped_total", ""): counts.num_skipped,
    }
