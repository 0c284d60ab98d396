"""The metrics of this project's Triton models: their families, and how their values reach the server's metrics port.

docs/metrics.md explains each family; a test compares that page with the tables here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from orchestrator.core.deployment.config import ServingConfig
from orchestrator.core.types import DraftCounts, EngineStatus
from orchestrator.server import pb

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Family:
    """One family of series.

    kind: gauge, counter or histogram. buckets: ascending upper bounds of a histogram, without +Inf.
    """

    name: str
    kind: str
    description: str
    buckets: tuple[float, ...] = ()

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        """Name and kind of the families on the port: a histogram is three counters (docs/metrics.md, Histograms)."""
        if self.kind != "histogram":
            return ((self.name, self.kind),)
        return tuple((f"{self.name}_{part}", "counter") for part in ("bucket", "sum", "count"))


class Series(NamedTuple):
    """A series: the name of its family on the port, and its labels in addition to the owner's."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()


Values = Mapping[Series, float]

FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
TOKEN_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
REQUEST_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0)
TOKENS = (1.0, 8.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 32768.0, 131072.0)

REQUEST_FAMILIES = (
    Family("spec_num_requests_waiting", "gauge", "Requests that wait for a running slot (max_running)"),
    Family("spec_num_requests_running", "gauge", "Sequences that run; a request for n sequences counts n times"),
    Family("spec_max_requests_waiting", "gauge", "max_waiting of serving.toml"),
    Family("spec_max_requests_running", "gauge", "max_running of serving.toml"),
    Family("spec_request_success_total", "counter", "Sequences that were answered, by finished_reason"),
    Family(
        "spec_request_refused_total",
        "counter",
        "Requests answered with an error, by reason; full: max_running, max_waiting",
    ),
    Family("spec_prompt_tokens_total", "counter", "Prompt tokens of the answered sequences"),
    Family("spec_prefix_cache_hits_total", "counter", "Prompt tokens that the target found in its KV blocks"),
    Family("spec_generation_tokens_total", "counter", "Tokens sent to clients"),
    Family("spec_request_queue_time_seconds", "histogram", "From the arrival to the start", FIRST_TOKEN_S),
    Family("spec_time_to_first_token_seconds", "histogram", "From the arrival to the first tokens", FIRST_TOKEN_S),
    Family("spec_inter_token_latency_seconds", "histogram", "Time per token after the first response", TOKEN_S),
    Family("spec_inter_chunk_latency_seconds", "histogram", "Time between two responses with tokens", TOKEN_S),
    Family("spec_e2e_request_latency_seconds", "histogram", "From the arrival to the last token", REQUEST_S),
    Family("spec_request_prompt_tokens", "histogram", "Prompt tokens of a sequence", TOKENS),
    Family("spec_request_generation_tokens", "histogram", "Generated tokens of a sequence", TOKENS),
    Family("spec_steps_total", "counter", "Steps: passes of the target, of one sequence each"),
    Family("spec_draft_tokens_total", "counter", "Draft tokens verified, by the source that proposed them"),
    Family("spec_accepted_tokens_total", "counter", "Draft tokens accepted, by the source that proposed them"),
    Family("spec_tested_per_position_total", "counter", "Steps that tested a draft token at this depth"),
    Family("spec_accepted_per_position_total", "counter", "Steps that accepted a draft token at this depth"),
    Family("spec_draft_seconds_total", "counter", "Time to propose, of all steps but each sequence's first"),
    Family("spec_verify_seconds_total", "counter", "Time of the calls of the target, of the same steps"),
    Family("spec_overhead_seconds_total", "counter", "The rest of the time between first and last token"),
)
DRAFT_FAMILIES = (
    Family("spec_draft_calls_total", "counter", "Calls of a drafter"),
    Family("spec_draft_late_total", "counter", "Calls of a drafter that took longer than draft_timeout_ms"),
    Family("spec_draft_failed_total", "counter", "Calls of a drafter that failed"),
    Family(
        "spec_draft_skipped_total", "counter", "Calls that were not made, because the drafter was late or had failed"
    ),
    Family("spec_draft_breaker_open", "gauge", "1 while no call is made of a drafter"),
)
ENGINE_FAMILIES = (
    Family("spec_engine_info", "gauge", "1; its labels say which engine, kernels, dtype and device serve the model"),
    Family("spec_kv_blocks", "gauge", "KV blocks: held by sequences, cached (found by content), free, total"),
    Family("spec_kv_cache_usage_ratio", "gauge", "KV blocks held by sequences, as a share of all (kv_memory_mb)"),
    Family("spec_sequences", "gauge", "Sequences that hold KV blocks"),
    Family("spec_passes_total", "counter", "Forward passes"),
    Family("spec_pass_requests_total", "counter", "Requests in these passes; divided by the passes: occupancy"),
    Family("spec_pass_seconds_total", "counter", "Time of these passes"),
    Family(
        "spec_preemptions_total",
        "counter",
        "Sequences that gave their KV blocks to older ones, to go on later (kv_memory_mb, max_running)",
    ),
)


class MetricsExporter:
    """One owner's series on Triton's metrics port; labels: distinguish them from other owners' series."""

    def __init__(self, families: tuple[Family, ...], **labels: str) -> None:
        parts = [(name, kind, family.description) for family in families for name, kind in family.parts]
        self._kinds = {name: kind for name, kind, _ in parts}
        self._families = {name: pb.metric_family(name, kind, description) for name, kind, description in parts}
        self._labels = labels
        self._series: dict[Series, Any] = {}
        self._shown: dict[Series, float] = {}
        self._is_broken = False
        self._lock = threading.Lock()

    def show(self, values: Values) -> None:
        """Show the values that have changed since the last call.

        After a failure nothing more is shown: no request may suffer from the metrics port.
        """
        with self._lock:
            if self._is_broken:
                return
            try:
                for key, value in values.items():
                    self._set(key, value)
            except Exception:
                self._is_broken = True
                log.exception("the metrics of %s are no longer updated", self._labels)

    def _set(self, key: Series, value: float) -> None:
        if key not in self._series:
            self._series[key] = pb.metric(self._families[key.name], self._labels | dict(key.labels))
        elif value == self._shown[key]:
            return
        if self._kinds[key.name] == "counter":
            shown = self._shown.get(key, 0.0)
            self._series[key].increment(value - shown if value >= shown else value)  # a new owner counts from 0
        else:
            self._series[key].set(value)
        self._shown[key] = value


def engine_values(status: EngineStatus) -> Values:
    """Return the values of an engine's series."""
    blocks = {
        "held": status.blocks_held,
        "cached": status.blocks_cached,
        "free": status.blocks_free,
        "total": status.blocks_total,
    }
    return {Series("spec_kv_blocks", (("state", state),)): count for state, count in blocks.items()} | {
        Series("spec_kv_cache_usage_ratio"): status.blocks_held / max(status.blocks_total, 1),
        Series("spec_sequences"): status.num_sequences,
        Series("spec_passes_total"): status.num_passes,
        Series("spec_pass_requests_total"): status.num_calls,
        Series("spec_pass_seconds_total"): status.pass_s,
        Series("spec_preemptions_total"): status.num_preempted,
    }


def info_values(config: ServingConfig, kernels: str) -> Values:
    """Return the series whose labels say how an engine computes; kernels: what computes its passes."""
    named = {name: str(getattr(config, name)) for name in ("engine", "dtype", "device")} | {"kernels": kernels}
    return {Series("spec_engine_info", tuple(named.items())): 1.0}


def draft_values(counts: DraftCounts, is_open: bool) -> Values:
    """Return the values of the series for the calls to one drafter."""
    return {
        Series("spec_draft_calls_total"): counts.num_calls,
        Series("spec_draft_late_total"): counts.num_late,
        Series("spec_draft_failed_total"): counts.num_failed,
        Series("spec_draft_skipped_total"): counts.num_skipped,
        Series("spec_draft_breaker_open"): float(is_open),
    }
