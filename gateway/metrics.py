"""The gateway's own Prometheus series, prefix `spec_gateway_`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

disable_created_metrics()  # type: ignore[no-untyped-call]  # a time of creation beside every counter tells nobody anything
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """The series of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "spec_gateway_requests",
            "Requests by endpoint and HTTP status",
            ["endpoint", "status"],
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
        self.prompt_tokens = Counter("spec_gateway_prompt_tokens", "Tokens of prompts", registry=self.registry)
        self.generation_tokens = Counter("spec_gateway_generation_tokens", "Tokens generated", registry=self.registry)
        self.steps = Counter("spec_gateway_spec_decode_num_drafts", "Steps", registry=self.registry)
        self.drafted = Counter("spec_gateway_spec_decode_num_draft_tokens", "Draft tokens", registry=self.registry)
        self.accepted = Counter(
            "spec_gateway_spec_decode_num_accepted_tokens", "Accepted draft tokens", registry=self.registry
        )
        self.failovers = Counter(
            "spec_gateway_failovers", "Streams that a replica lost or refused", ["reason"], registry=self.registry
        )
        self.replica_ready = Gauge(
            "spec_gateway_replica_ready",
            "Whether requests may be sent to a replica",
            ["replica"],
            registry=self.registry,
        )
        self.replica_running = Gauge(
            "spec_gateway_replica_requests_running", "Sequences on a replica", ["replica"], registry=self.registry
        )
