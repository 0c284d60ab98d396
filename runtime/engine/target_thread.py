"""The target engine's thread, and the grammars of its steps: their masks are made before the pass, on other threads.

So a slow grammar delays its own request, not a pass that others share. A mask depends only on the output and the tree,
not on logits, so it can be made as soon as the tree is known; and the library makes it without the interpreter's lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from orchestrator.core.context import Context
from orchestrator.core.costs import PassCosts
from orchestrator.core.errors import EngineError, RequestError, ServingError, Unavailable, UnknownSequence
from orchestrator.core.grammar import Grammars
from orchestrator.core.grammar_matcher import Matcher
from orchestrator.core.messages.context import Delta
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.worker_pool import WorkerPool
from runtime.engine.calls import Engine, GuidedStep, Reply
from runtime.engine.client_thread import SHUTTING_DOWN
from runtime.engine.kv.sequences import IDLE_S
from runtime.engine.thread import EngineThread

log = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(eq=False)
class GuidedSequence:
    """The output of a sequence whose steps are single calls, and its position in its grammar."""

    sampling: Sampling
    matcher: Matcher
    context: Context = field(default_factory=lambda: Context([]))
    used_s: float = field(default_factory=time.monotonic)
    is_busy: bool = False

    def follow(self, delta: Delta) -> None:
        """Take the new tokens; raises UnknownSequence if the tokens before them differ from the sender's."""
        delta.check_follows(self.context)
        self.context.truncate(delta.context_start)
        self.context.commit(delta.context_ids.tolist())
        self.matcher.follow(self.context.ids[delta.prompt_len :])


class TargetThread(EngineThread[StepRequest]):
    """Answers target steps; for those under a grammar it makes masks first, on a separate thread for each.

    grammars: the checkpoint's grammar compiler; None = the engine has no tokenizer.
    Attribute pass_costs: what passes cost, as measured at load; None = not measured.
    Invariant: a call waits only for its own masks; a matcher is used by one thread at a time.
    """

    def __init__(
        self,
        engine: Engine[StepRequest],
        name: str,
        prepare: Callable[[], None] = lambda: None,
        grammars: Grammars | None = None,
    ) -> None:
        super().__init__(engine, name, prepare)
        self.pass_costs: PassCosts | None = None
        self._grammars = grammars
        self._guides: WorkerPool[object] = WorkerPool("guide")  # one thread per guided call
        self._guided: dict[int, GuidedSequence] = {}
        self._guided_lock = threading.Lock()

    def matcher(self, sampling: Sampling) -> Matcher | None:
        """Return the matcher of a request's grammar, None if it has no grammar; compiling one may take long.

        Raises RequestError for a grammar that cannot be followed, Unavailable while too many are being compiled.
        """
        options = sampling.logits_options
        if options.grammar is None:
            return None
        if self._grammars is None:
            raise RequestError("this engine was started without a tokenizer, which a grammar needs")
        return self._grammars.matcher(options.grammar, options.end_ids)

    def guide(self, work: Callable[[], Result], then: Callable[[Result | ServingError], None]) -> None:
        """Do work for a grammar on a thread of its own, and call `then` there once, with the result or the error."""
        self._guides.start(work).future.add_done_callback(partial(_hand_over, then))

    def submit(self, request: StepRequest, deadline_s: float, on_answer: Reply) -> None:
        """Queue a step as `EngineThread` does; a step under a grammar is queued once its masks are made."""
        if request.sampling.logits_options.grammar is None or isinstance(request, GuidedStep):
            super().submit(request, deadline_s, on_answer)
        else:
            self.guide(partial(self._with_masks, request), partial(self._submit_guided, deadline_s, on_answer))

    def release(self, sequence_id: int) -> None:
        """Queue the end of a sequence."""
        with self._guided_lock:
            self._guided.pop(sequence_id, None)
        super().release(sequence_id)

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop after the current pass; calls whose masks are not made yet are refused with Unavailable."""
        self._guides.close(SHUTTING_DOWN)
        super().close(timeout_s)

    def _submit_guided(self, deadline_s: float, on_answer: Reply, step: GuidedStep | ServingError) -> None:
        if isinstance(step, ServingError):
            on_answer(step)
        else:
            super().submit(step, deadline_s, on_answer)

    def _with_masks(self, request: StepRequest) -> GuidedStep:
        sequence = self._begin(request)
        try:
            sequence.follow(request.delta)
            legal = sequence.matcher.legal_rows(request.tree)
        except ServingError:
            with self._guided_lock:  # a matcher that has failed is of no more use
                self._guided.pop(request.delta.sequence_id, None)
            raise
        finally:
            sequence.used_s, sequence.is_busy = time.monotonic(), False
        return GuidedStep(**vars(request), legal=legal)

    def _begin(self, request: StepRequest) -> GuidedSequence:
        """Return the sequence of a step, reserved for this call; raises ServingError."""
        sequence_id, now_s = request.delta.sequence_id, time.monotonic()
        with self._guided_lock:
            for number, sequence in list(self._guided.items()):  # forget those whose callers have died
                if not sequence.is_busy and now_s - sequence.used_s > IDLE_S:
                    del self._guided[number]
            known = self._guided.get(sequence_id)
            if known and known.is_busy:
                raise Unavailable(f"sequence {sequence_id} has a call under way")
            if known and known.sampling == request.sampling:
                known.is_busy = True
                return known
        if request.delta.context_start:
            raise UnknownSequence(f"sequence {sequence_id}")
        matcher = self.matcher(request.sampling)
        assert matcher is not None
        made = GuidedSequence(request.sampling, matcher, is_busy=True)
        with self._guided_lock:
            self._guided[sequence_id] = made
        return made


def _hand_over(then: Callable[[Result | ServingError], None], work: Future[Result]) -> None:
    error = work.exception()
    if error is None:
        then(work.result())
    elif isinstance(error, ServingError):
        then(error)
    else:
        log.error("the masks of a step could not be made", exc_info=error)
        then(EngineError("internal error of an engine; the server's log has the cause"))
