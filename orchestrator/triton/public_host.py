"""Hosts `speculative` and `speculative_unary`: reads requests, admits them, owns the lines to the drafters."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from orchestrator.core.errors import ConfigError, RequestError, ServingError, Unavailable
from orchestrator.core.sampling_params import LogitsOptions
from orchestrator.deployment.capabilities import capabilities_of
from orchestrator.deployment.config import CHECKPOINTS, PLACES_FOLDER, ServingConfig
from orchestrator.deployment.engine_manifest import served_checkpoint
from orchestrator.proposers.dependencies import DrafterClients, ProposerDependencies
from orchestrator.proposers.memory import Memory
from orchestrator.proposers.tables import load_tables
from orchestrator.requests.generation_request import GenerationRequest, RequestBuilder
from orchestrator.requests.inputs import RequestInputs, read
from orchestrator.sampling.grammar import Grammars
from orchestrator.sampling.grammar_matcher import Matcher
from orchestrator.triton import pb
from orchestrator.triton.admission import Admission
from orchestrator.triton.breaker import Breaker
from orchestrator.triton.clients import BlsDrafterClient, DraftAnswer
from orchestrator.triton.request_handler import GenerationHandler

SHUTDOWN_LIMIT_S = 20.0

log = logging.getLogger(__name__)


class PublicHost:
    """One per stub process; every request runs on a thread of its own."""

    def __init__(self, config: ServingConfig, model_config: str) -> None:
        """model_config: Triton's configuration of the model, JSON; a model that is not decoupled cannot stream."""
        streams = bool(json.loads(model_config).get("model_transaction_policy", {}).get("decoupled"))
        drafters = [name for name in CHECKPOINTS if name != "target" and getattr(config, name)]
        self._config = config
        self._checkpoint = served_checkpoint(config)
        checkpoint = self._checkpoint
        self._grammars = Grammars(checkpoint.tokenizer_file, checkpoint.vocab_size, checkpoint.eos_ids)
        self._builder = RequestBuilder(
            config, self._checkpoint, frozenset(drafters), self._grammars, streams, capabilities_of(config)
        )
        folder = os.environ.get(PLACES_FOLDER)
        self._admission = Admission(config.max_running, config.max_waiting, Path(folder) if folder else None)
        self._breakers = {name: self._breaker(name) for name in drafters}
        tables, tokenizer = config.ngram_tables, self._checkpoint.tokenizer
        self._tables = load_tables(tables, tokenizer) if tables else None
        self._memory = Memory(config.remember_tokens) if config.remember_tokens else None
        self._check_default()

    def execute(self, requests: list[Any]) -> None:
        """Admit the requests; they are answered from their own threads."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._accept(request, sender)
            except Exception as error:
                self._refuse(sender, error)

    def finalize(self) -> None:
        """Let the running requests end, within a limit."""
        self._admission.close(SHUTDOWN_LIMIT_S)
        for breaker in self._breakers.values():
            breaker.close()

    def _accept(self, request: Any, sender: Any) -> None:
        given = read(pb.tensors_of(request), pb.parameters_of(request))
        timeout_ms = self._builder.timeout_ms(given)
        deadline_s = time.monotonic() + timeout_ms / 1000
        ticket = GenerationHandler(given, sender, deadline_s, self._builder, self._materials, self._memory)
        if not self._admission.admit(ticket):
            raise Unavailable(
                f"{self._config.max_running} requests run and {self._config.max_waiting} wait; "
                "try again later (max_running, max_waiting in serving.toml)"
            )

    @staticmethod
    def _refuse(sender: Any, error: Exception) -> None:
        if not isinstance(error, ServingError):
            log.exception("a request could not be read")
            error = ServingError("internal error; the server's log has the cause")
        pb.send_error(sender, str(error), error)

    def _breaker(self, name: str) -> Breaker[DraftAnswer]:
        return Breaker(name, self._config.max_running, self._config.draft_timeout_ms / 1000)

    def _check_default(self) -> None:
        """Raise ConfigError when a request that names no method could not be served."""
        job = self._builder.build(RequestInputs(input_ids=(0,)))
        try:
            job.plan.proposer(self._materials(job))
        except RequestError as error:
            raise ConfigError(f"default_speculation: {error}") from None

    def _materials(self, job: GenerationRequest) -> ProposerDependencies:
        return ProposerDependencies(
            drafter_client=self._lines(job.cache_salt),
            vocab_size=self._checkpoint.vocab_size,
            prediction=job.prediction,
            max_nodes=job.limits.max_nodes,
            num_parameters=self._checkpoint.num_parameters,
            tables=self._tables,
            memory=self._memory.of(job.cache_salt) if self._memory else None,
            matcher=self._matcher(job.sampling.logits_options),
        )

    def _matcher(self, logits_options: LogitsOptions) -> Matcher | None:
        return (
            self._grammars.matcher(logits_options.grammar, logits_options.end_ids) if logits_options.grammar else None
        )

    def _lines(self, cache_salt: str) -> DrafterClients:
        """Return what builds one request's lines to drafters."""
        return lambda name: BlsDrafterClient(name, self._breakers[name], self._checkpoint.vocab_size, cache_salt)
