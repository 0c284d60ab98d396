"""The public Triton models: read requests and admit them."""

from __future__ import annotations

import json
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.core.deployment.capabilities import capabilities_of
from orchestrator.core.deployment.config import STATE_FOLDER, ServingConfig, load_config
from orchestrator.core.deployment.drain_state import Drain
from orchestrator.core.deployment.engine_manifest import served_checkpoint
from orchestrator.core.errors import ConfigError, Draining, QueueFull, RequestError, Unavailable
from orchestrator.core.worker_pool import WorkerPool
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.drafting.drafter_clients import DraftAnswer
from orchestrator.drafting.sources import NativeMemory, ProposerSources
from orchestrator.server import pb
from orchestrator.server.admission import Admission, queue_full, tenant_limits
from orchestrator.server.breaker import Breaker
from orchestrator.server.clients import BlsDrafterClient, BlsTargetClient
from orchestrator.server.generation_handler import GenerationHandler, send_error
from orchestrator.server.generation_request import GenerationRequest
from orchestrator.server.inputs import read
from orchestrator.server.logs import configure_logging
from orchestrator.server.loop import SequenceState, StepByStep, Steps, StepsOfRun
from orchestrator.server.metrics import DRAFT_FAMILIES, MetricsExporter, draft_values
from orchestrator.server.request_builder import RequestBuilder
from orchestrator.server.request_metrics import RequestMetrics, reason_of
from orchestrator.server.tracing import Traces

SHUTDOWN_LIMIT_S = 20.0
# Sending a refusal waits for Triton's process, so a pool of threads sends them, never the thread that accepts requests.
NUM_REFUSING, REFUSING_LIMIT_S = 8, 5.0


class PublicHost:
    """Triton's entry points of `speculative` and `speculative_unary`; every request runs on a thread of its own."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the deployment and the target's tokenizer. args: Triton's; a model that is not decoupled cannot stream.

        Raises ConfigError when a request that names no method could not be served.
        """
        configure_logging(args["model_name"])
        self._config = config = load_config(os.environ["SERVING_CONFIG"])
        self._checkpoint = served_checkpoint(config)
        self._streams = bool(json.loads(args["model_config"]).get("model_transaction_policy", {}).get("decoupled"))
        folder = Path(os.environ.get(STATE_FOLDER) or tempfile.mkdtemp(prefix="slots-"))  # its own without a launcher
        self._refusals: WorkerPool[None] = WorkerPool("refusal", NUM_REFUSING)
        self._drain = Drain(folder)
        self._breakers: dict[str, Breaker[DraftAnswer]] = {
            name: Breaker(name, config.max_running, config.draft_timeout_ms / 1000)
            for name in (() if config.is_colocated else config.drafters)
        }
        self._drafter_exporters = {
            name: MetricsExporter(DRAFT_FAMILIES, model=args["model_name"], drafter=name) for name in self._breakers
        }
        self._memory = NativeMemory(config.remember_tokens) if config.remember_tokens else None
        self._sources = ProposerSources(config, self._checkpoint, self._memory)
        self._builder = RequestBuilder(
            config,
            self._checkpoint,
            frozenset(config.drafters),
            self._sources.grammars,
            self._streams,
            capabilities_of(config),
        )
        self._check_default(config)
        self._admission = Admission(config.max_running, config.max_waiting, folder, tenant_limits(config))
        self._metrics = RequestMetrics(args["model_name"], self._gauges)
        self._traces = Traces.from_environment(args["model_name"])

    def _check_default(self, config: ServingConfig) -> None:
        """Raise ConfigError if a request that names no method could not be served."""
        try:
            # With `colocated`, the target's process has the drafter.
            if not (config.is_colocated and self._builder.default.plan.drafter):
                self._builder.default.plan.proposer(self._dependencies(self._builder.default))
        except RequestError as error:
            raise ConfigError(f"default_speculation: {error}") from None

    def execute(self, requests: list[Any]) -> None:
        """Admit the requests; they are answered from their own threads."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._accept(request, sender)
            except Exception as error:
                self._metrics.refused(reason_of(error))
                self._send_refusal(sender, error, request.request_id())

    def is_ready(self) -> bool:
        """Tell Triton, which asks from release 26.03 on, whether new requests are accepted."""
        return not self._drain.is_requested

    def finalize(self) -> None:
        """Let the running requests end, within a limit."""
        self._admission.close(SHUTDOWN_LIMIT_S)
        self._refusals.finish(REFUSING_LIMIT_S)
        for breaker in self._breakers.values():
            breaker.close()
        try:
            self._metrics.close()
        finally:
            if self._traces:
                self._traces.close()

    def _accept(self, request: Any, sender: Any) -> None:
        if not self.is_ready():
            raise Draining("the server is draining: send the request to another replica, or again in a second")
        # Before anything is read, because refusals must be cheap under a flood of requests.
        if self._admission.would_refuse() and not pb.has_input(request, "priority"):
            raise self._full()
        inputs = read(pb.tensors_of(request), pb.parameters_of(request))
        deadline_s = time.monotonic() + self._builder.timeout_ms(inputs) / 1000
        handler = GenerationHandler(
            inputs,
            sender,
            deadline_s,
            self._builder,
            self._steps,
            self._refuse,
            None if self._config.is_colocated else self._memory,  # runs are remembered in the target's process
            self._metrics,
            self._traces,
            request.request_id(),
        )
        if not self._admission.admit(handler):
            raise self._full()

    def _full(self) -> QueueFull:
        """Return the refusal of a request that finds the queue full."""
        return queue_full(self._config, self._admission.retry_after_s())

    def _refuse(self, reason: str, sender: Any) -> None:
        """Answer a request that never ran."""
        self._metrics.refused(reason)
        error: Unavailable
        match reason:
            case "full":
                error = self._full()
            case "shutdown":
                error = Draining("the server is shutting down")
            case "deadline":
                error = Unavailable("the request waited until its deadline")
            case _:
                error = Unavailable(f"the request was {reason}")
        self._send_refusal(sender, error)

    def _send_refusal(self, sender: Any, error: Exception, request_id: str = "") -> None:
        """Send a refusal from another thread, or from this one if the system allows no more threads."""
        sent = self._refusals.start(partial(send_error, sender, error, request_id)).future
        if sent.done() and isinstance(sent.exception(), Unavailable):
            send_error(sender, error, request_id)

    def _gauges(self) -> dict[str, float]:
        """Show the state of the drafters, and return that of the queue."""
        for name, breaker in self._breakers.items():
            self._drafter_exporters[name].show(draft_values(breaker.counts, breaker.is_open))
        return {
            "spec_num_requests_waiting": self._admission.num_waiting,
            "spec_num_requests_running": self._admission.num_running,
            "spec_max_requests_waiting": self._config.max_waiting,
            "spec_max_requests_running": self._config.max_running,
        }

    def _steps(self, request: GenerationRequest, sequence: SequenceState, target: BlsTargetClient) -> Steps:
        """Return the steps of a sequence, from a run of the target's engine if it serves runs."""
        if self._config.is_colocated:
            take = partial(target.take, sequence.context, sequence.sampling, sequence.options, request.run)
            return StepsOfRun(sequence, take)
        return StepByStep(sequence, target, request.plan.proposer(self._dependencies(request)))

    def _dependencies(self, request: GenerationRequest) -> ProposerDependencies:
        vocab_size, options = self._checkpoint.vocab_size, request.sampling.logits_options
        matcher = self._sources.grammars.matcher(options.grammar, options.end_ids) if options.grammar else None
        return self._sources.dependencies(
            request.prediction,
            request.limits.max_nodes,
            request.inputs.cache_salt,
            lambda name: BlsDrafterClient(name, self._breakers[name], vocab_size, request.inputs.cache_salt),
            matcher=matcher,
        )
