"""One request of a public model, from its admission to its FINAL flag; knows neither the queue nor a reload."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from orchestrator.core.errors import (
    ClientDisconnected,
    EngineError,
    EngineLost,
    ServingError,
    Unavailable,
    public_text,
)
from orchestrator.core.worker_pool import WorkerPool
from orchestrator.drafting.sources import NativeMemory
from orchestrator.server import pb
from orchestrator.server.clients import BlsTargetClient
from orchestrator.server.generation_request import GenerationRequest
from orchestrator.server.inputs import RequestInputs
from orchestrator.server.logs import request_name
from orchestrator.server.loop import SequenceState, Steps, generate
from orchestrator.server.request_builder import RequestBuilder
from orchestrator.server.request_metrics import RequestMetrics, RequestTimes, reason_of
from orchestrator.server.responses import ResponseMerger, Responses, Send
from orchestrator.server.text import FinishReason
from orchestrator.server.tracing import Traces

# How often Triton is asked whether the client has gone; asking takes 0.1 ms.
CANCEL_POLL_S = 0.02
# A sequence ends by the deadline plus two calls that the target does not answer (clients.GRACE_S each).
GRACE_S = 30.0

log = logging.getLogger(__name__)


@dataclass(eq=False)
class GenerationHandler:
    """One client request; implements `orchestrator.server.admission.RequestHandler`.

    sender: Triton's response sender. steps: returns what runs the steps of one of its sequences. refuse: answers a
    request that never ran, given the reason. memory: where outputs are remembered; None = nowhere. request_id: the
    client's name for it, for logs and spans; "" if it has none.
    Invariant: whatever happens, the client gets its responses or one error, then the FINAL flag, once.
    """

    inputs: RequestInputs
    sender: Any
    deadline_s: float
    builder: RequestBuilder
    steps: Callable[[GenerationRequest, SequenceState, BlsTargetClient], Steps]
    refuse: Callable[[str, Any], None]
    memory: NativeMemory | None
    metrics: RequestMetrics
    traces: Traces | None = None
    request_id: str = ""
    times: RequestTimes = field(default_factory=RequestTimes)
    _failed: bool = False
    _cancelled: bool = False
    _asked_s: float = 0.0

    def __post_init__(self) -> None:
        self.num_slots = self.builder.num_sequences(self.inputs)
        self.num_tokens = self.builder.most_tokens(self.inputs)
        self.priority, self.tenant = self.inputs.priority, self.inputs.cache_salt

    def is_cancelled(self) -> bool:
        """True when the client has gone."""
        return bool(self.sender.is_cancelled())

    def give_up(self, reason: str) -> None:
        """Answer a request that never ran."""
        self.refuse(reason, self.sender)

    def run(self) -> None:
        """Serve the request to its end."""
        self.times.started_s = time.monotonic()
        try:
            request = self.builder.build(self.inputs)
            outputs = self._serve(request)
        except Exception as error:
            self.metrics.refused(reason_of(error))
            send_error(self.sender, error, self.request_id)
        else:
            if self.builder.streams:
                pb.send_final(self.sender)
            if self.memory:
                for output in outputs:
                    self.memory.learn(self.inputs.cache_salt, output)

    def _serve(self, request: GenerationRequest) -> list[list[int]]:
        """Generate the request's sequences side by side; return the outputs to remember.

        A sequence that is stuck is abandoned GRACE_S after the deadline, and nothing more of it is sent.
        """
        merger = ResponseMerger(request.num_sequences, self.inputs.stream, self._send)
        sequences = [partial(self._generate, request, i, merger.sender(i)) for i in range(request.num_sequences)]
        if len(sequences) == 1:
            return [sequences[0]()]
        pool: WorkerPool[list[int]] = WorkerPool("sequence")
        futures = [pool.start(partial(self._stop_others_on_error, sequence)).future for sequence in sequences]
        left_s = max(self.deadline_s - time.monotonic(), 0.0) + GRACE_S
        _, stuck = wait(futures, min(left_s, threading.TIMEOUT_MAX))
        is_answered = merger.close()
        pool.close("a sequence did not end by the request's deadline")
        return [future.result() for future in futures if not (is_answered and future in stuck)]

    def _stop_others_on_error(self, sequence: Callable[[], list[int]]) -> list[int]:
        """Generate one of several sequences; if it fails, the others need not go on."""
        try:
            return sequence()
        except BaseException:
            self._failed = True
            raise

    def _generate(self, request: GenerationRequest, index: int, send: Send) -> list[int]:
        """Run the loop to its end; return the output to remember: empty if a deadline or a cancellation cut it off."""
        sequence = request.sequence(index, self.builder.checkpoint.tokenizer)
        target = BlsTargetClient(self.inputs.cache_salt, self.deadline_s, request.max_len, self._is_unwanted)
        steps = self.steps(request, sequence, target)
        responses = Responses(request, sequence, send)
        try:
            generate(sequence, steps, self._reason_to_stop, responses.emit)
        except ClientDisconnected:
            responses.finish(FinishReason.CANCELLED)
        except (Unavailable, EngineLost):
            if time.monotonic() < self.deadline_s - 0.1:
                raise
            responses.finish(FinishReason.DEADLINE)
        finally:
            steps.close()
            target.release()
        self.metrics.ended(self.times, sequence, request.plan.method)
        if self.traces:
            self.traces.ended(self.times, sequence, request.plan.method, self.request_id)
        ended = sequence.output.finish in (FinishReason.STOP, FinishReason.LENGTH)
        return sequence.context.output[: sequence.output.num_tokens] if ended else []

    def _is_unwanted(self) -> bool:
        """Return whether nobody waits for the target's step any more; the target itself keeps to the deadline."""
        return self._reason_to_stop() is FinishReason.CANCELLED

    def _reason_to_stop(self) -> FinishReason | None:
        now_s = time.monotonic()
        if not self._cancelled and now_s - self._asked_s >= CANCEL_POLL_S:
            self._cancelled, self._asked_s = self.is_cancelled(), now_s
        if self._failed or self._cancelled:
            return FinishReason.CANCELLED
        return FinishReason.DEADLINE if now_s >= self.deadline_s else None

    def _send(self, tensors: dict[str, Any]) -> None:
        # The one response of a model that does not stream carries the flag: a flag sent after it crashes Triton if the
        # unary call has been cancelled meanwhile (SIGSEGV in ResponseFactorySendFlags, 2.51; like server#7265).
        pb.send(self.sender, tensors, final=not self.builder.streams)


def send_error(sender: Any, error: Exception, request_id: str = "") -> None:
    """Answer with an error and the FINAL flag; the cause of an error that is not ours goes to the log only."""
    if isinstance(error, EngineError):
        log.error("%s failed: %s", request_name(request_id), error)
    elif not isinstance(error, ServingError):
        log.error("%s failed", request_name(request_id), exc_info=error)
        error = ServingError("internal error; the server's log has the cause")
    # Together with the flag: unary gRPC reports OK for an error whose flag comes after it.
    pb.send_error(sender, public_text(error), error)
