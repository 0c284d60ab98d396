"""One client request on its way through `speculative`: checked, run, answered, always closed with a FINAL flag."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial
from typing import Any

from orchestrator.core.errors import EngineLost, ServingError, Unavailable
from orchestrator.core.worker_pool import WorkerPool
from orchestrator.generation.loop import generate
from orchestrator.generation.responses import ResponseMerger, Responses, Send
from orchestrator.generation.text import FinishReason
from orchestrator.proposers.dependencies import ProposerDependencies
from orchestrator.proposers.memory import Memory
from orchestrator.requests.generation_request import GenerationRequest, RequestBuilder
from orchestrator.requests.inputs import RequestInputs
from orchestrator.triton import pb
from orchestrator.triton.clients import BlsTargetClient

# A sequence ends by the deadline, but for two calls of a target that does not answer them (bls.GRACE_S each).
GRACE_S = 30.0

log = logging.getLogger(__name__)


class GenerationHandler:
    """Implements `orchestrator.triton.admission.RequestHandler`.

    Invariant: whatever happens, the client gets its responses or one error, then the FINAL flag, once.
    """

    def __init__(
        self,
        given: RequestInputs,
        sender: Any,
        deadline_s: float,
        builder: RequestBuilder,
        materials: Callable[[GenerationRequest], ProposerDependencies],
        memory: Memory | None,
    ) -> None:
        self.deadline_s = deadline_s
        self.num_places = builder.num_sequences(given)
        self._failed = False
        self._given = given
        self._sender = sender
        self._builder = builder
        self._materials = materials
        self._memory = memory

    def is_cancelled(self) -> bool:
        """True when the client has gone."""
        return bool(self._sender.is_cancelled())

    def give_up(self, reason: str) -> None:
        """Answer a request that never ran."""
        words = {"deadline": "the request waited until its deadline", "shutdown": "the server stops"}
        self._send_error(Unavailable(words.get(reason, f"the request was {reason}")))

    def run(self) -> None:
        """Serve the request to its end."""
        try:
            job = self._builder.build(self._given)
            outputs = self._serve(job)
        except ServingError as error:
            self._send_error(error)
        except Exception:
            log.exception("a request failed")
            self._send_error(ServingError("internal error; the server's log has the cause"))
        else:
            if self._builder.streams:
                pb.send_final(self._sender)
            if self._memory:
                for output in outputs:
                    self._memory.learn(job.cache_salt, output)

    def _serve(self, job: GenerationRequest) -> list[list[int]]:
        """Generate the request's sequences, several at once; return those that came to their own end.

        One that is stuck is left behind, GRACE_S after the deadline, and nothing of it is sent any more.
        """
        together = ResponseMerger(job.num_sequences, job.stream, self._send)
        sequences = [partial(self._generate, job, i, together.sender(i)) for i in range(job.num_sequences)]
        if len(sequences) == 1:
            return [sequences[0]()]
        workers: WorkerPool[list[int]] = WorkerPool("sequence")
        started = [workers.start(partial(self._stopping_all, sequence)).future for sequence in sequences]
        left_s = max(self.deadline_s - time.monotonic(), 0.0) + GRACE_S
        _, stuck = wait(started, min(left_s, threading.TIMEOUT_MAX))
        is_answered = together.close()
        workers.close("a sequence did not end by the request's deadline")
        return [future.result() for future in started if not (is_answered and future in stuck)]

    def _stopping_all(self, sequence: Callable[[], list[int]]) -> list[int]:
        """Generate one of several sequences; when it fails, the others need not go on."""
        try:
            return sequence()
        except BaseException:
            self._failed = True
            raise

    def _generate(self, job: GenerationRequest, index: int, send: Send) -> list[int]:
        """Run the loop to its end; return the response, empty when it was broken off: it is not to be learnt."""
        sequence = job.sequence(index, self._builder.checkpoint.tokenizer)
        target = BlsTargetClient(job.cache_salt, self.deadline_s)
        proposer = job.plan.proposer(self._materials(job))
        responses = Responses(job, sequence, send)
        try:
            generate(sequence, target, proposer, self._guard, responses.emit)
        except (Unavailable, EngineLost):
            if time.monotonic() < self.deadline_s - 0.1:
                raise
            responses.finish_late()
        finally:
            proposer.close()
            target.release()
        ended = sequence.output.finish in (FinishReason.STOP, FinishReason.LENGTH)
        return sequence.context.output[: sequence.output.num_tokens] if ended else []

    def _guard(self) -> FinishReason | None:
        if self._failed or self.is_cancelled():
            return FinishReason.CANCELLED
        return FinishReason.DEADLINE if time.monotonic() >= self.deadline_s else None

    def _send(self, tensors: dict[str, Any]) -> None:
        # The one response of a model that does not stream takes the flag along: a flag behind it crashes Triton
        # when the unary call was cancelled meanwhile (SIGSEGV in ResponseFactorySendFlags, 2.51; like server#7265).
        pb.send(self._sender, tensors, final=not self._builder.streams)

    def _send_error(self, error: ServingError) -> None:
        # With its flag: unary gRPC answers OK to an error whose flag comes behind it.
        pb.send_error(self._sender, str(error), error)
