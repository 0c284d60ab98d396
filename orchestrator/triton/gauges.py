"""An engine's figures on Triton's metrics port; sends only what has changed, since one figure costs 16 µs."""

from __future__ import annotations

import logging
from typing import Any

from orchestrator.triton import pb
from orchestrator.types import EngineStatus

FAMILIES = {
    "spec_kv_blocks": ("gauge", "KV blocks: held by sequences, cached (found by content), free, total"),
    "spec_sequences": ("gauge", "Sequences that hold KV blocks"),
    "spec_passes_total": ("counter", "Forward passes"),
    "spec_pass_requests_total": ("counter", "Requests in these passes; divided by the passes: occupancy"),
}

log = logging.getLogger(__name__)


class EngineGauges:
    """The series of one Triton model; `update` is made for the engine's own thread, twice a second.

    Law: once an engine has been idle for a second, the port shows its figures of now.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._families = {name: pb.metric_family(name, *rest) for name, rest in FAMILIES.items()}
        self._series: dict[tuple[str, str], Any] = {}
        self._shown: dict[tuple[str, str], int] = {}
        self._broken = False

    def update(self, status: EngineStatus) -> None:
        """Show the figures; a metrics port that fails is left alone, since no request may suffer from it."""
        if self._broken:
            return
        try:
            self._show(status)
        except Exception:
            self._broken = True
            log.exception("no more metrics of model %s", self._model)

    def _show(self, status: EngineStatus) -> None:
        blocks = {
            "held": status.blocks_held,
            "cached": status.blocks_cached,
            "free": status.blocks_free,
            "total": status.blocks_total,
        }
        for state, number in blocks.items():
            self._set("spec_kv_blocks", number, state)
        self._set("spec_sequences", status.num_sequences)
        self._set("spec_passes_total", status.num_passes)
        self._set("spec_pass_requests_total", status.num_jobs)

    def _set(self, family: str, value: int, state: str = "") -> None:
        key = (family, state)
        if key not in self._series:
            labels = {"model": self._model} | ({"state": state} if state else {})
            self._series[key] = self._families[family].Metric(labels=labels)
        elif value == self._shown[key]:
            return
        if FAMILIES[family][0] == "counter":
            self._series[key].increment(value - self._shown.get(key, 0))
        else:
            self._series[key].set(value)
        self._shown[key] = value
