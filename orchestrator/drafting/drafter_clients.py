"""One request's calls of a drafter, wherever the drafter runs, and the client of a drafter in this process."""

from __future__ import annotations

import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from orchestrator.core.context import Context
from orchestrator.core.errors import RequestError, ServingError, Unavailable, UnknownSequence
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.drafter import DrafterUse, DraftRequest
from orchestrator.core.proposal import Budget
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.types import NO_HEAD_INPUT, DraftResponse, HeadInput
from orchestrator.drafting.dependencies import NO_ANSWER

log = logging.getLogger(__name__)

#: A drafter's answer, or the reason why it does not draft for this request, which is not the drafter's failure.
DraftAnswer = DraftResponse | UnknownSequence | RequestError | Unavailable

#: How long a request does without a drafter that was late or full, in multiples of a call's time limit.
PAUSE_OF_LIMIT = 4.0
LONGEST_PAUSE_S = 30.0


@dataclass
class Backoff:
    """A pause after each failure, twice as long as the one before until something succeeds; all in seconds."""

    first_s: float
    longest_s: float
    _pause_s: float = 0.0
    _until_s: float = 0.0

    @property
    def is_on(self) -> bool:
        """True during a pause."""
        return time.monotonic() < self._until_s

    def note(self, has_succeeded: bool) -> None:
        """Note an outcome."""
        self._pause_s = 0.0 if has_succeeded else min(max(2 * self._pause_s, self.first_s), self.longest_s)
        self._until_s = time.monotonic() + self._pause_s


def new_sequence_id() -> int:
    """Return a random id that is not 0."""
    return secrets.randbits(63) + 1


class DrafterSession(ABC):
    """Sends a drafter what is new in one request's context; implements `dependencies.DrafterClient`.

    limit_s: longest time of a call; a later draft is of no use.
    has_given_up: True once the drafter cannot serve this request, whose context only grows.
    """

    def __init__(self, drafter: str, cache_salt: str, limit_s: float) -> None:
        self._drafter, self._cache_salt, self._limit_s = drafter, cache_salt, limit_s
        self._sequence_id = new_sequence_id()
        self._num_sent = 0
        # A drafter that is late or full at every step would cost many times what it saves.
        first_s = PAUSE_OF_LIMIT * limit_s
        self._pause = Backoff(first_s, max(first_s, LONGEST_PAUSE_S))
        self._begun: Callable[[], DraftAnswer | None] | None = None
        self._last_request: DraftRequest | None = None  # the last call; None once one has failed
        self.has_given_up = False

    def begin(self, context: Context, sampling: Sampling, budget: Budget, head: HeadInput = NO_HEAD_INPUT) -> None:
        """Begin the call that `propose` will wait for."""
        self._begun = self._start(context, sampling, budget, head)

    def propose(
        self, context: Context, sampling: Sampling, budget: Budget, head: HeadInput = NO_HEAD_INPUT
    ) -> DraftResponse:
        """Return the drafter's tree, or NO_ANSWER if it is late, fails or breaks the protocol."""
        answer = self._ask(context, sampling, budget, head)
        if isinstance(answer, UnknownSequence) and self._num_sent:
            self._num_sent = 0
            answer = self._ask(context, sampling, budget, head)
        if isinstance(answer, RequestError):
            log.warning("%s no longer drafts for sequence %d: %s", self._drafter, self._sequence_id, answer)
            self.has_given_up = True
        if answer is NO_ANSWER or not isinstance(answer, DraftResponse):
            self._last_request = None
            return NO_ANSWER
        self._num_sent = len(context)
        return answer

    @property
    def use(self) -> DrafterUse | None:
        """None: native code cannot call a drafter in another process."""
        return None

    def close(self) -> None:
        """End the drafter's sequence, without waiting."""
        if self._num_sent:
            self._release()

    def _ask(self, context: Context, sampling: Sampling, budget: Budget, head: HeadInput) -> DraftAnswer | None:
        """Return the answer to a call, begun now unless it has been; None if it fails, NO_ANSWER if it is not made."""
        wait, self._begun = self._begun or self._start(context, sampling, budget, head), None
        answer = wait()
        if answer is None or isinstance(answer, Unavailable):
            self._pause.note(has_succeeded=False)
        elif isinstance(answer, DraftResponse) and answer.tree.num_nodes:  # a bare tree costs the drafter nothing
            self._pause.note(has_succeeded=True)
        return answer

    def _start(
        self, context: Context, sampling: Sampling, budget: Budget, head: HeadInput
    ) -> Callable[[], DraftAnswer | None]:
        """Begin a call, and return a function that waits for its answer.

        No call is made while the drafter is paused or busy, or once it cannot serve the request.
        """
        if self.has_given_up or self._pause.is_on or self._is_busy:
            return lambda: NO_ANSWER
        # The call may outlive this step, so it takes a snapshot of the context.
        delta = delta_of(context, self._num_sent, self._sequence_id, self._cache_salt)
        limit_ms = max(int(self._limit_s * 1000), 1)
        request = DraftRequest(delta, sampling.unguided, budget.max_nodes, budget.max_depth, head, limit_ms)
        self._last_request = request
        return self._call(request)

    @property
    def _is_busy(self) -> bool:
        """True while the drafter still works on a call that was late."""
        return False

    @abstractmethod
    def _call(self, request: DraftRequest) -> Callable[[], DraftAnswer | None]:
        """Begin a call and return a function that waits for its answer.

        The answer is None if the call fails or is late, and NO_ANSWER if no call was made.
        """

    @abstractmethod
    def _release(self) -> None:
        """Let the drafter forget the sequence."""


class Drafter(Protocol):
    """A drafter in this process (`runtime.engine.local_drafter.LocalDrafter`); any thread may call."""

    def is_native(self, request: DraftRequest) -> bool:
        """Return whether native code can make the next drafts by itself."""

    def begin(self, request: DraftRequest) -> Callable[[], DraftResponse]:
        """Queue a call; return a function that waits for its answer.

        The answer comes by the deadline or one pass later; the function raises ServingError if the call fails.
        """

    def release(self, sequence_id: int) -> None:
        """Forget a sequence."""


class LocalDrafterClient(DrafterSession):
    """Calls a drafter in this process."""

    def __init__(self, name: str, drafter: Drafter, cache_salt: str, limit_s: float) -> None:
        super().__init__(name, cache_salt, limit_s)
        self._engine = drafter

    def _call(self, request: DraftRequest) -> Callable[[], DraftAnswer | None]:
        return partial(self._answer, self._engine.begin(request))

    @property
    def use(self) -> DrafterUse | None:
        """How native code can continue from the last draft; None if it cannot, or if there was no answer."""
        request = self._last_request
        return DrafterUse(self._engine, request) if request and self._engine.is_native(request) else None

    def _answer(self, wait: Callable[[], DraftResponse]) -> DraftAnswer | None:
        try:
            return wait()
        except (UnknownSequence, RequestError, Unavailable) as error:
            return error
        except ServingError as error:
            log.error("%s failed on sequence %d: %s", self._drafter, self._sequence_id, error)
            return None

    def _release(self) -> None:
        self._engine.release(self._sequence_id)
