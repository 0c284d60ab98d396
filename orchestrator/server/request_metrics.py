"""Metrics of a public model's requests: added up in memory as they end, shown on the metrics port once a second.

Changing one series on the port takes about 16 µs, so nothing is shown during a step or a request.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from orchestrator.core.errors import QueueFull, RequestError, Unavailable
from orchestrator.server.loop import SequenceState
from orchestrator.server.metrics import REQUEST_FAMILIES, MetricsExporter, Series, Values
from orchestrator.server.text import FinishReason

log = logging.getLogger(__name__)

REPORT_S = 1.0
#: Depths from here on are counted together, under this one as "32+".
MAX_POSITION = 32
#: Clients can combine methods in many ways: names beyond this many are counted under "other".
MAX_NAMES = 64
OTHER = "other"

#: Why a request is answered with an error (docs/metrics.md, Refusals).
REFUSALS = ("invalid", "full", "unavailable", "error", "cancelled", "deadline", "shutdown")

_BUCKETS = {family.name: family.buckets for family in REQUEST_FAMILIES if family.kind == "histogram"}


def reason_of(error: Exception) -> str:
    """Return the reason of a refusal."""
    if isinstance(error, RequestError):
        return "invalid"
    if isinstance(error, QueueFull):
        return "full"
    return "unavailable" if isinstance(error, Unavailable) else "error"


@dataclass
class _Histogram:
    """counts: one for each bucket, and one for the values above the last."""

    counts: list[int]
    total: float = 0.0


class Totals:
    """Counters and histograms, added up; any thread may call it."""

    def __init__(self) -> None:
        self._counters: dict[Series, float] = {}
        self._histograms: dict[Series, _Histogram] = {}
        self._names: dict[str, set[str]] = {}
        self._lock = threading.Lock()

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        with self._lock:
            key = Series(name, tuple(labels.items()))
            self._counters[key] = self._counters.get(key, 0.0) + amount

    def observe(self, name: str, value: float, count: int = 1, **labels: str) -> None:
        """Add `count` observations of one value to a histogram."""
        buckets, key = _BUCKETS[name], Series(name, tuple(labels.items()))
        with self._lock:
            if key not in self._histograms:
                self._histograms[key] = _Histogram([0] * (len(buckets) + 1))
            histogram = self._histograms[key]
            histogram.counts[bisect_left(buckets, value)] += count
            histogram.total += value * count

    def bounded(self, label: str, name: str) -> str:
        """Return a name that a client chose, or OTHER once the label has MAX_NAMES others: series are never freed."""
        with self._lock:
            names = self._names.setdefault(label, set())
            if name not in names and len(names) >= MAX_NAMES:
                return OTHER
            names.add(name)
            return name

    def values(self) -> Values:
        """Return the value of every series, those of histograms as Prometheus reads them: buckets are cumulative."""
        with self._lock:
            values = dict(self._counters)
            for (name, labels), histogram in self._histograms.items():
                bounds = [f"{bound:g}" for bound in _BUCKETS[name]] + ["+Inf"]
                cumulative = list(accumulate(histogram.counts))
                for bound, count in zip(bounds, cumulative, strict=True):
                    values[Series(f"{name}_bucket", (*labels, ("le", bound)))] = count
                values[Series(f"{name}_sum", labels)] = histogram.total
                values[Series(f"{name}_count", labels)] = cumulative[-1]
            return values


@dataclass
class RequestTimes:
    """When a request arrived and when it got its running slot, by time.monotonic()."""

    arrived_s: float = field(default_factory=time.monotonic)
    started_s: float = 0.0


class RequestMetrics:
    """The metrics of a public model's requests.

    gauges: reads the gauges' present values; called before each report.
    """

    def __init__(self, model: str, gauges: Callable[[], Mapping[str, float]]) -> None:
        self._exporter = MetricsExporter(REQUEST_FAMILIES, model=model)
        self._gauges = gauges
        self._totals = Totals()
        self._closed = threading.Event()
        self._begin_at_zero()
        threading.Thread(target=self._report_often, name="metrics", daemon=True).start()

    def ended(self, times: RequestTimes, sequence: SequenceState, method: str) -> None:
        """Count a sequence that was answered; does not raise, since its client has been answered."""
        try:
            self._count(times, sequence, method)
        except Exception:
            log.exception("the metrics of a sequence could not be recorded")

    def refused(self, reason: str) -> None:
        """Count a request that was answered with an error; reason: one of REFUSALS."""
        self._totals.add("spec_request_refused_total", reason=reason)

    def close(self) -> None:
        """Report one last time."""
        self._closed.set()
        self.report()

    def report(self) -> None:
        """Show all values now."""
        gauges = {Series(name): value for name, value in self._gauges().items()}
        self._exporter.show({**gauges, **self._totals.values()})

    def _report_often(self) -> None:
        while not self._closed.wait(REPORT_S):
            try:
                self.report()
            except Exception:  # no descriptor, for example: the next report may succeed
                log.exception("the metrics could not be reported; the next report tries again")

    def _begin_at_zero(self) -> None:
        """Show the series whose labels are known, so that their first increase is seen as one."""
        for finish in FinishReason:
            self._totals.add("spec_request_success_total", 0, finished_reason=finish.value)
        for reason in REFUSALS:
            self._totals.add("spec_request_refused_total", 0, reason=reason)
        for name in ("spec_prompt_tokens_total", "spec_prefix_cache_hits_total"):
            self._totals.add(name, 0)
        for name in _BUCKETS:
            self._totals.observe(name, 0.0, 0)

    def _count(self, times: RequestTimes, sequence: SequenceState, method: str) -> None:
        totals, reason = self._totals, sequence.output.finish or FinishReason.CANCELLED
        method = totals.bounded("method", method)
        totals.add("spec_request_success_total", finished_reason=reason.value)
        totals.add("spec_prompt_tokens_total", sequence.context.prompt_len)
        totals.add("spec_prefix_cache_hits_total", sequence.statistics.num_cached_tokens)
        totals.add("spec_generation_tokens_total", sequence.statistics.num_tokens, method=method)
        totals.observe("spec_request_prompt_tokens", sequence.context.prompt_len)
        totals.observe("spec_request_generation_tokens", sequence.statistics.num_tokens)
        totals.observe("spec_request_queue_time_seconds", times.started_s - times.arrived_s)
        self._count_times(times, sequence, method)
        self._count_drafts(sequence, method)

    def _count_times(self, times: RequestTimes, sequence: SequenceState, method: str) -> None:
        totals, statistics = self._totals, sequence.statistics
        responses = [(at_s, count) for at_s, count in statistics.responses if count]
        if not responses:
            return
        first_s, last_s = responses[0][0], responses[-1][0]
        totals.observe("spec_time_to_first_token_seconds", first_s - times.arrived_s)
        totals.observe("spec_e2e_request_latency_seconds", last_s - times.arrived_s)
        for (before_s, _), (at_s, count) in pairwise(responses):
            totals.observe("spec_inter_chunk_latency_seconds", at_s - before_s)
            totals.observe("spec_inter_token_latency_seconds", (at_s - before_s) / count, count)
        rest_s = (last_s - first_s) - statistics.draft_s - statistics.target_s
        totals.add("spec_draft_seconds_total", statistics.draft_s, method=method)
        totals.add("spec_verify_seconds_total", statistics.target_s, method=method)
        totals.add("spec_overhead_seconds_total", max(rest_s, 0.0), method=method)

    def _count_drafts(self, sequence: SequenceState, method: str) -> None:
        totals, statistics = self._totals, sequence.statistics
        totals.add("spec_steps_total", statistics.num_steps, method=method)
        for name, count in statistics.sources.items():
            source = totals.bounded("source", name)
            totals.add("spec_draft_tokens_total", count.num_drafted, method=method, source=source)
            totals.add("spec_accepted_tokens_total", count.num_accepted, method=method, source=source)
        for index, (tested, accepted) in enumerate(zip(statistics.tested, statistics.accepted, strict=True)):
            position = str(index + 1) if index + 1 < MAX_POSITION else f"{MAX_POSITION}+"
            totals.add("spec_tested_per_position_total", tested, method=method, position=position)
            totals.add("spec_accepted_per_position_total", accepted, method=method, position=position)
