"""The served code without Triton, as a system to audit: requests, loop, proposers, engines and responses."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path
from typing import Any, Generic

from auditor.requests import Answer, Options, to_values
from native.response_memory import NativeMemory
from orchestrator.core.context import Context
from orchestrator.core.deployment.checkpoint import read_checkpoint
from orchestrator.core.deployment.config import ServingConfig
from orchestrator.core.errors import ServingError
from orchestrator.core.grammar import Grammars
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.drafter import DraftRequest
from orchestrator.core.proposal import Budget
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.types import NO_HEAD_INPUT, DraftResponse, HeadInput
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.server import loop
from orchestrator.server.generation_request import GenerationRequest
from orchestrator.server.inputs import read
from orchestrator.server.request_builder import RequestBuilder
from orchestrator.server.responses import Responses
from runtime.engine.calls import Engine, EngineCall, Reply, Request
from runtime.engine.draft import DraftEngine
from runtime.engine.target import TargetEngine
from tests.support.engines import EngineTarget, ask, make_paged

DRAFTERS = frozenset({"draft"})


class Inline(Generic[Request]):
    """Replaces an EngineThread by an engine on its caller's thread: calls share no passes."""

    def __init__(self, engine: Engine[Request]) -> None:
        self._engine = engine
        self._lock = threading.Lock()

    def submit(self, request: Request, deadline_s: float, on_answer: Reply) -> None:
        """Run passes until the call is answered."""
        jobs = [EngineCall(request, deadline_s, on_answer)]
        with self._lock:
            while jobs:
                jobs = self._engine.advance(jobs)

    def release(self, sequence_id: int) -> None:
        """End a sequence."""
        with self._lock:
            self._engine.sequences.drop(sequence_id)


class EngineClient:
    """Implements `orchestrator.drafting.dependencies.DrafterClient` over a draft engine in this process."""

    has_given_up = False
    use = None

    def __init__(self, engine: Inline[DraftRequest], sequence_id: int) -> None:
        self._engine, self._sequence_id, self._num_sent = engine, sequence_id, 0

    def begin(self, context: Context, sampling: Sampling, budget: Budget, head: HeadInput = NO_HEAD_INPUT) -> None:
        """Do nothing: `propose` makes the call."""

    def propose(
        self, context: Context, sampling: Sampling, budget: Budget, head: HeadInput = NO_HEAD_INPUT
    ) -> DraftResponse:
        """Return the engine's chain or tree."""
        delta = delta_of(context, self._num_sent, self._sequence_id, "")
        request = DraftRequest(delta, sampling, budget.max_nodes, budget.max_depth, head)
        drafted: DraftResponse = ask(self._engine, request)
        self._num_sent = len(context)
        return drafted

    def close(self) -> None:
        """End the drafter's sequence."""
        self._engine.release(self._sequence_id)


class InProcessSystem:
    """Implements `AuditedSystem` over checkpoints in float64.

    learnt: earlier texts that proposers can draft from.
    """

    def __init__(self, target: Path, draft: Path, learnt: tuple[str, ...] = ()) -> None:
        config = ServingConfig(target=str(target), draft=str(draft), dtype="float64")
        self._checkpoint = read_checkpoint(config.target)
        checkpoint = self._checkpoint
        grammars = Grammars(checkpoint.tokenizer_file, checkpoint.vocab_size, checkpoint.eos_ids)
        self._builder = RequestBuilder(config, checkpoint, DRAFTERS, grammars)
        self._target = Inline(TargetEngine(make_paged(target)))
        self._draft = Inline(DraftEngine(make_paged(draft)))
        self._memory = NativeMemory(100_000)
        for text in learnt:
            self._memory.learn("", checkpoint.tokenizer.encode(text).ids)
        self._sequence_ids = itertools.count(1)

    def ask(self, prompt: str, options: Options) -> Answer:
        """Serve one request, as orchestrator/server/generation_handler.py does."""
        sent: list[dict[str, Any]] = []
        try:
            job = self._builder.build(read({}, json.dumps({"text_input": prompt, **options})))
            self._generate(job, sent)
        except ServingError as error:
            return Answer(error=str(error))
        return Answer.of(sent)

    def _generate(self, job: GenerationRequest, sent: list[dict[str, Any]]) -> None:
        sequence_id = next(self._sequence_ids)
        sequence = job.sequence(0, self._checkpoint.tokenizer)
        target = EngineTarget(self._target, sequence_id)  # type: ignore[arg-type]
        proposer = job.plan.proposer(self._dependencies(job, sequence_id))
        responses = Responses(job, sequence, lambda tensors: sent.append(to_values(tensors)))
        try:
            loop.generate(sequence, loop.StepByStep(sequence, target, proposer), lambda: None, responses.emit)
        finally:
            proposer.close()
            target.release()

    def _dependencies(self, job: GenerationRequest, sequence_id: int) -> ProposerDependencies:
        return ProposerDependencies(
            drafter_client=lambda name: EngineClient(self._draft, sequence_id),
            vocab_size=self._checkpoint.vocab_size,
            max_nodes=job.limits.max_nodes,
            num_parameters=self._checkpoint.num_parameters,
            memory=self._memory.of(job.inputs.cache_salt),
        )
