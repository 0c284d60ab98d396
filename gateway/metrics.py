"""The gateway's own Prometheus series, prefix `spec_gateway_`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.replicas import Replica

disable_created_metrics()  # type: ignore[no-untyped-call]  # nobody needs a creation time with every counter
#: Why a stream moved, and why a replica did not begin a request: the reasons of the errors in gateway/triton.py.
FAILOVERS = ("lost", "silent", "draining", "full", "deadline", "failed")
REFUSALS = ("full", "draining", "late", "deadline", "failed")
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """The series of one gateway, in a registry of their own. replicas: by address, as they come and go."""

    def __init__(self, replicas: Mapping[str, Replica] = MappingProxyType({})) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(ReplicaCollector(replicas))
        self.requests = Counter(
            "spec_gateway_requests",
            "Requests by endpoint, HTTP status and API key",
            ["endpoint", "status", "key"],
            registry=self.registry,
        )
        self.running = Gauge("spec_gateway_requests_running", "Requests under way", registry=self.registry)
        self.request_seconds = Histogram(
            "spec_gateway_request_seconds",
            "Duration of requests",
            ["endpoint"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.first_token_seconds = Histogram(
            "spec_gateway_time_to_first_token_seconds",
            "Time to the first token",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "spec_gateway_prompt_tokens", "Tokens of prompts by API key", ["key"], registry=self.registry
        )
        self.generation_tokens = Counter(
            "spec_gateway_generation_tokens", "Tokens generated, by API key", ["key"], registry=self.registry
        )
        self.steps = Counter("spec_gateway_spec_decode_num_drafts", "Steps", registry=self.registry)
        self.drafted = Counter("spec_gateway_spec_decode_num_draft_tokens", "Draft tokens", registry=self.registry)
        self.accepted = Counter(
            "spec_gateway_spec_decode_num_accepted_tokens", "Accepted draft tokens", registry=self.registry
        )
        self.failovers = Counter(
            "spec_gateway_failovers", "Streams that a replica lost", ["reason"], registry=self.registry
        )
        self.refusals = Counter(
            "spec_gateway_refusals",
            "Times that a replica refused a request, or did not begin it",
            ["reason"],
            registry=self.registry,
        )
        # Shown from the start: Prometheus' increase() does not count what came before the first sample of a series.
        for counter, reasons in ((self.failovers, FAILOVERS), (self.refusals, REFUSALS)):
            for reason in reasons:
                counter.labels(reason)


class ReplicaCollector(Collector):
    """The state of each replica at the moment of a scrape. replicas: by address."""

    def __init__(self, replicas: Mapping[str, Replica]) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        """Yield the series."""
        ready = GaugeMetricFamily(
            "spec_gateway_replica_ready", "Whether requests may be sent to a replica", labels=["replica"]
        )
        running = GaugeMetricFamily(
            "spec_gateway_replica_requests_running", "Sequences on a replica", labels=["replica"]
        )
        for replica in list(self._replicas.values()):
            ready.add_metric([replica.address], replica.is_usable)
            running.add_metric([replica.address], replica.num_running)
        yield from (ready, running)
