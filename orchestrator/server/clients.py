"""Clients of the other Triton models: the target, the drafters, and the models of NVIDIA's backend."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import NoneType
from typing import TypeVar

from orchestrator.core.arrays import Incoming, Tensors
from orchestrator.core.context import Context
from orchestrator.core.errors import (
    ClientDisconnected,
    ConfigError,
    EngineLost,
    RequestError,
    ServingError,
    Unavailable,
    UnknownSequence,
)
from orchestrator.core.messages.checks import check_acceptance, check_response, check_steps
from orchestrator.core.messages.context import Release, delta_of
from orchestrator.core.messages.drafter import DraftRequest
from orchestrator.core.messages.run import RunOptions, TakeSteps
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.proposal import Step
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, Distribution, DraftResponse, StepOptions
from orchestrator.core.worker_pool import Call
from orchestrator.drafting.dependencies import NO_ANSWER
from orchestrator.drafting.drafter_clients import DraftAnswer, DrafterSession, new_sequence_id
from orchestrator.server import pb
from orchestrator.server.breaker import Breaker

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

TARGET = "target"
POOL_RETRY_S = 0.05
# The launcher restarts a dead engine in a few seconds, most of them the model's own loading time.
LOST_RETRY_S = 0.25
LOST_LIMIT_S = 30.0
# An engine answers by the deadline or one pass later; an answer that is later than this will never come.
GRACE_S = 10.0


class BlsTargetClient:
    """Calls the Triton model `target` for one request; implements `orchestrator.core.types.Target`.

    deadline_s: when the request is due, by time.monotonic(). max_len: maximum tokens of its context, drafts included.
    is_unwanted: asked while a call waits, four times a second; True = the client has gone.
    """

    def __init__(
        self,
        cache_salt: str,
        deadline_s: float,
        max_len: int = 0,
        is_unwanted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._max_len = max_len
        self._sequence_id = new_sequence_id()
        self._cache_salt = cache_salt
        self._deadline_s = deadline_s
        self._is_unwanted = is_unwanted
        self._num_sent = 0
        self._was_called = False  # since the target's process was last lost, so that it may know the sequence

    def step(
        self,
        context: Context,
        tree: TokenTree,
        sampling: Sampling,
        options: StepOptions,
        q: tuple[Distribution, ...] = (),
    ) -> Acceptance:
        """Run one step; raises the target's error when neither resending nor waiting helps.

        If the target lost the sequence, the whole context is sent, once. The target waits for KV blocks by itself. If
        it cannot take the step now, a new request fails, and a running one tries again until its deadline. If its
        process died, the client waits for the new one and sends the whole context, so that the text goes on. Raises
        ClientDisconnected when the client has gone meanwhile.
        """
        request = partial(self._request, context, tree, sampling, options, q if sampling.rule.uses_q else ())
        acceptance = self._with_retries(context, lambda: self._call(context, request(), Acceptance))
        check_acceptance(acceptance, tree)
        return acceptance

    def take(self, context: Context, sampling: Sampling, options: StepOptions, run: RunOptions) -> list[Step]:
        """Return the next steps of a run, which begins with the first call; raises as `step` does."""

        def request() -> StepRequest | TakeSteps:
            if self._num_sent:
                return TakeSteps(self._sequence_id, len(context))
            return self._request(context, TokenTree.bare(), sampling, options, (), run)

        steps = self._with_retries(context, lambda: self._call(context, request(), list[Step]))
        check_steps(steps)
        return steps

    def release(self) -> None:
        """Tell the target to forget the sequence, even if its first step failed; a hint that may get lost."""
        if not self._was_called:
            return
        try:
            pb.call(TARGET, Release(self._sequence_id), NoneType, GRACE_S)
        except ServingError as error:
            log.debug("the target will find out by itself that sequence %d has ended: %s", self._sequence_id, error)

    def _with_retries(self, context: Context, call: Callable[[], Answer]) -> Answer:
        """Return the answer to a call, which is made again as long as its error may be temporary."""
        lost_since_s: float | None = None
        while not self._is_unwanted():
            try:
                return call()
            except UnknownSequence:
                if not self._num_sent:
                    raise
                self._num_sent = 0
            except Unavailable:
                is_new = len(context) == context.prompt_len
                if is_new or time.monotonic() + POOL_RETRY_S > self._deadline_s:
                    raise
                time.sleep(POOL_RETRY_S)
            except EngineLost:
                self._num_sent, self._was_called = 0, False  # a release would have to wait for the target, too
                now_s = time.monotonic()
                lost_since_s = lost_since_s or now_s
                if now_s - lost_since_s >= LOST_LIMIT_S or now_s + LOST_RETRY_S > self._deadline_s:
                    raise
                time.sleep(LOST_RETRY_S)
        raise ClientDisconnected("the client has gone")

    def _request(
        self,
        context: Context,
        tree: TokenTree,
        sampling: Sampling,
        options: StepOptions,
        q: tuple[Distribution, ...],
        run: RunOptions | None = None,
    ) -> StepRequest:
        delta = delta_of(context, self._num_sent, self._sequence_id, self._cache_salt)
        return StepRequest(delta, tree, sampling, options, self._left_ms(), q, run, self._max_len)

    def _call(self, context: Context, request: StepRequest | TakeSteps, kind: type[Answer]) -> Answer:
        self._was_called = True
        answer = pb.call(TARGET, request, kind, self._left_ms() / 1000 + GRACE_S, self._is_unwanted)
        self._num_sent = len(context)
        return answer

    def _left_ms(self) -> int:
        return max(1, int((self._deadline_s - time.monotonic()) * 1000))


class BlsDrafterClient(DrafterSession):
    """Calls a drafter that is a Triton model of its own."""

    def __init__(self, model: str, breaker: Breaker[DraftAnswer], vocab_size: int, cache_salt: str) -> None:
        super().__init__(model, cache_salt, breaker.timeout_s)
        self._breaker = breaker
        self._vocab_size = vocab_size
        self._last: Call[DraftAnswer] | None = None

    @property
    def _is_busy(self) -> bool:
        # A late draft is of no use to this step, and the drafter would still be busy with it at the next one.
        return self._last is not None and self._breaker.is_running(self._last)

    def _call(self, request: DraftRequest) -> Callable[[], DraftAnswer | None]:
        self._last = call = self._breaker.start(partial(self._answer, request), pb.lost_check(self._drafter))
        return lambda: self._breaker.wait(call) if call else NO_ANSWER

    def _answer(self, request: DraftRequest) -> DraftAnswer:
        try:
            response = pb.execute(self._drafter, request, DraftResponse)
        except (UnknownSequence, RequestError, Unavailable) as error:
            return error
        check_response(response, self._vocab_size, request.max_nodes)
        return response

    def _release(self) -> None:
        self._breaker.start(self._call_release, pb.lost_check(self._drafter))

    def _call_release(self) -> DraftAnswer:
        pb.execute(self._drafter, Release(self._sequence_id), NoneType)
        return NO_ANSWER


#: (tensors, outputs, request_id, limit_s) → the tensors of the response
ModelCall = Callable[[Incoming, Sequence[str], str, float], Tensors]
_DECOUPLED = re.compile(r"^[^#]*\bdecoupled\s*:\s*true\b", re.IGNORECASE | re.MULTILINE)


def caller_beside(folder: str) -> Callable[[str], ModelCall]:
    """Return a function that takes the name of a model of NVIDIA's backend and returns a function that calls it.

    folder: that of one of our own models, in the same repository. The function raises ConfigError for a decoupled
    model: a response to a nested decoupled call can wait forever in SendBLSDecoupledResponse (python_be.cc; triton
    server#5988, seen with 2.51 after 10 to 20 batches of eight), on the thread with which the called model answers all
    its callers.
    """

    def caller(model: str) -> ModelCall:
        file = Path(folder).parent / model / "config.pbtxt"
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror} (python -m build.trtllm.repository)") from None
        if _DECOUPLED.search(text):
            raise ConfigError(
                f"{file}: the model must not be decoupled, because nested decoupled calls can hang Triton "
                "(server#5988; model_transaction_policy { decoupled: false })"
            )
        return partial(pb.call_foreign, model)

    return caller
