"""A call to an engine: its request, its deadline, and how to answer it."""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from orchestrator.core.arrays import BoolArray
from orchestrator.core.errors import ServingError
from orchestrator.core.messages.context import Delta
from orchestrator.core.messages.drafter import DraftRequest
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.proposal import Step
from orchestrator.core.types import Acceptance, Distribution, DraftResponse
from runtime.engine.kv.sequences import CachedSequence, SequenceTable
from runtime.models.heads.engines.trees import GrowingTree
from runtime.models.native.decoding import Continuation, Draft

log = logging.getLogger(__name__)

WARM_UP_LIMIT_S = 120.0
ONE_TOKEN = Continuation(max_tokens=1)

Answer = Acceptance | DraftResponse | list[Step]
Reply = Callable[[Answer | ServingError], None]
Request = TypeVar("Request", StepRequest, DraftRequest)


@dataclass(frozen=True, eq=False)
class BurstRequest(StepRequest):
    """A step after which the engine may run more; the answer is a list of steps, or the acceptance of this one alone.

    max_steps: maximum number of steps. limit_s: no step begins later than this after the pass of the first one has
    begun. continuation: how the sequence continues after the first step. sources: the sources of the first tree's
    nodes.
    """

    max_steps: int = 1
    limit_s: float = 0.0
    continuation: Continuation = ONE_TOKEN
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class GuidedStep(StepRequest):
    """A step under a grammar. legal: (m + 1, V), the tokens allowed after the root and after every node."""

    legal: BoolArray = field(kw_only=True)


@dataclass(eq=False)
class FinishedSteps:
    """The steps that native code has finished for a call that is not answered yet.

    draft: the draft after the last step. answer_by_s: when the call must be answered, by time.monotonic(). num_tokens:
    how many tokens the steps commit. noted_s: when the last step was noted, at first when the call arrived.
    """

    draft: Draft
    answer_by_s: float
    noted_s: float
    steps: list[Step] = field(default_factory=list)
    num_tokens: int = 0


@dataclass(eq=False)
class DraftedChain:
    """What a draft model notes of the tokens that it has drafted so far for a call.

    q: the distribution that each was sampled from; empty under `coupled`. score: the log-confidence of their path.
    """

    q: list[Distribution] = field(default_factory=list)
    score: float = 0.0


@dataclass(eq=False)
class DraftedTree:
    """A draft tree while it grows. q: the distribution that each candidate's children were sampled from, if any."""

    tree: GrowingTree
    q: dict[int, Distribution] = field(default_factory=dict)

    def drafted(self) -> DraftResponse:
        """Return the tree, and the distribution that each node was sampled from, if any."""
        nodes, tree = self.tree.drafted(), self.tree.token_tree()
        return DraftResponse(tree, tuple(self.q[self.tree.parents[node]] for node in nodes) if self.q else ())


@dataclass
class Progress:
    """Counters that an engine shares with its thread.

    num_passes, num_calls: passes run, and the calls that took part in them. num_waiting: items in the thread's inbox,
    and threads that need a drafter which a burst has borrowed; while it is not 0, a burst begins no more steps.
    """

    num_passes: int = 0
    num_calls: int = 0
    num_waiting: ctypes.c_int32 = field(default_factory=ctypes.c_int32)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def count(self, num_calls: int, num_passes: int = 1) -> None:
        """Count passes in each of which `num_calls` calls took part."""
        self.num_passes += num_passes
        self.num_calls += num_passes * num_calls

    def add_waiting(self, number: int) -> None:
        """Change num_waiting; any thread may call."""
        with self._lock:
            self.num_waiting.value += number


@dataclass(eq=False)
class EngineCall(Generic[Request]):
    """A step or draft call. deadline_s: latest time of the answer, by time.monotonic().

    sequence: set by the engine when it opens the call. finished: of a step, the steps of its burst so far. chain, tree:
    of a draft, what has been drafted so far; tree is None for a chain.
    """

    request: Request
    deadline_s: float
    on_answer: Reply
    arrived_s: float = field(default_factory=time.monotonic)
    sequence: CachedSequence | None = field(default=None, init=False)
    answered: bool = field(default=False, init=False)
    finished: FinishedSteps | None = field(default=None, init=False)
    chain: DraftedChain = field(default_factory=DraftedChain, init=False)
    tree: DraftedTree | None = field(default=None, init=False)

    def is_late(self, now_s: float) -> bool:
        """Return whether the call is late and may be refused.

        Once a token has been sampled it may not: how long the call took may depend on that token.
        """
        has_sampled = self.chain.q or (self.tree and self.tree.q)
        return self.deadline_s <= now_s and not (has_sampled or self.finished)

    def reply(self, answer: Answer | ServingError) -> None:
        """Answer the call; called once. An error in `on_answer` is logged, so that it does not end the pass."""
        self.answered = True
        try:
            self.on_answer(answer)
        except Exception:
            log.exception("the answer to sequence %d could not be delivered", self.sequence_id)

    def answer_finished(self) -> bool:
        """Answer with the steps finished so far, if there are any; return whether the call is answered."""
        if self.finished and not self.answered:
            self.reply(self.finished.steps)
        return self.answered

    @property
    def delta(self) -> Delta:
        """The committed context that came with the call."""
        return self.request.delta

    @property
    def sequence_id(self) -> int:
        """The sequence that the call belongs to."""
        return self.request.delta.sequence_id

    @property
    def opened(self) -> CachedSequence:
        """The sequence of a call that has been opened."""
        assert self.sequence is not None
        return self.sequence


class Engine(Protocol[Request]):
    """The engine that an engine thread runs: one forward pass at a time over all waiting calls.

    progress: shared with the thread; the engine counts a pass before it answers the calls in it, so that a caller with
    an answer finds its pass counted.
    """

    progress: Progress

    @property
    def kernels(self) -> str:
        """What computes the passes: torch or native."""

    @property
    def sequences(self) -> SequenceTable:
        """The live sequences; the thread drops those that have ended or are idle."""

    def advance(self, calls: list[EngineCall[Request]]) -> list[EngineCall[Request]]:
        """Run one pass, or several for BurstRequest; answer the calls that are complete, and return the others."""


def submit_and_wait(submit: Callable[[Request, float, Reply], None], request: Request) -> Answer:
    """Submit a warm-up call and return its answer; raises it if it is an error."""
    answers: queue.SimpleQueue[Answer | ServingError] = queue.SimpleQueue()
    submit(request, time.monotonic() + WARM_UP_LIMIT_S, answers.put)
    answer = answers.get(timeout=WARM_UP_LIMIT_S + 1.0)
    if isinstance(answer, ServingError):
        raise answer
    return answer
