"""A span for each answered sequence, made when it has ended and sent over OTLP/HTTP; off unless its endpoint is set.

OpenTelemetry's own environment variables configure it: OTEL_EXPORTER_OTLP_ENDPOINT turns it on, OTEL_TRACES_SAMPLER and
OTEL_TRACES_SAMPLER_ARG choose how many spans are kept (docs/metrics.md, Traces).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from orchestrator.server.loop import SequenceState
from orchestrator.server.request_metrics import RequestTimes

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
#: Most responses shown in a span; a longer text shows every second one, every third one, and so on.
MAX_RESPONSES = 64


class Traces:
    """Makes spans; raises ImportError if OpenTelemetry is not installed. model: the Triton model."""

    def __init__(self, model: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME take precedence over this name.
        resource = Resource.create({} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "specserve"})
        self._model = model
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("specserve")

    @classmethod
    def from_environment(cls, model: str, environ: Mapping[str, str] = os.environ) -> Traces | None:
        """Return the traces of a model; None if no endpoint is set, or, with a warning, if OpenTelemetry is missing.

        That is no reason not to serve: clusters set the endpoint for all their containers.
        """
        if not (found := [name for name in ENDPOINTS if environ.get(name)]):
            return None
        try:
            return cls(model)
        except ImportError as error:
            log.warning("no traces, although %s is set: pip install 'specserve[otel]' (%s)", found[0], error)
            return None

    def ended(self, times: RequestTimes, sequence: SequenceState, method: str, request_id: str) -> None:
        """Make the span of a sequence; does not raise, since its client has been answered.

        request_id: the client's name for its request, "" if it has none.
        """
        try:
            self._make(times, sequence, method, request_id)
        except Exception:
            log.exception("the span of a sequence could not be created")

    def close(self) -> None:
        """Send what has not been sent yet."""
        self._provider.shutdown()

    def _make(self, times: RequestTimes, sequence: SequenceState, method: str, request_id: str) -> None:
        # The loop's clock is monotonic and has no date.
        offset_s = time.time() - time.monotonic()
        span = self._tracer.start_span("generate", start_time=_ns(times.arrived_s + offset_s))
        if span.is_recording():
            span.set_attributes({**self._attributes(sequence, method), "spec.request_id": request_id})
            span.add_event("start", timestamp=_ns(times.started_s + offset_s))
            responses = sequence.statistics.responses
            stride = -(-len(responses) // MAX_RESPONSES) or 1
            for index in range(0, len(responses), stride):
                at_s, count = responses[index]
                span.add_event("response", {"index": index, "tokens": count}, timestamp=_ns(at_s + offset_s))
        span.end(end_time=_ns(time.time()))

    def _attributes(self, sequence: SequenceState, method: str) -> dict[str, Any]:
        """Return the attributes that OpenTelemetry defines for generative models, and the statistics of speculation."""
        statistics, finish = sequence.statistics, sequence.output.finish
        return {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.model": self._model,
            "gen_ai.usage.input_tokens": sequence.context.prompt_len,
            "gen_ai.usage.output_tokens": statistics.num_tokens,
            "gen_ai.response.finish_reasons": [finish.value] if finish else [],
            "spec.method": method,
            "spec.steps": statistics.num_steps,
            "spec.draft_tokens": statistics.num_draft_tokens,
            "spec.accepted_tokens": statistics.num_accepted_tokens,
            "spec.acceptance_length": statistics.acceptance_length,
            "spec.cached_tokens": statistics.num_cached_tokens,
        }


def _ns(at_s: float) -> int:
    return int(at_s * 1e9)
