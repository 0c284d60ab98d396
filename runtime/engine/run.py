"""One run: the steps of a sequence, which the engine's thread runs one after another, and which the caller takes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from orchestrator.core.arrays import BoolArray
from orchestrator.core.context import Context
from orchestrator.core.drafting import Drafting
from orchestrator.core.errors import EngineError, ServingError, Unavailable, UnknownSequence
from orchestrator.core.grammar_matcher import Matcher, legal_drafts
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.run import RunOptions
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.proposal import Proposal, Proposer, Step
from orchestrator.core.types import Acceptance, StepOptions
from runtime.engine.calls import BurstRequest, GuidedStep
from runtime.engine.target_thread import TargetThread
from runtime.models.native.decoding import Continuation

log = logging.getLogger(__name__)

#: How many steps a run may be ahead of its caller: enough for the longest hold and the time until the next `take`.
MAX_AHEAD = 64
RELEASED = "the sequence was released"

Answer = list[Step] | Acceptance | ServingError
Reply = Callable[[Any], None]
#: (receiver of the answer, answer) → None; must not block.
Deliver = Callable[[Reply, Answer], None]


class Run:
    """The run of one sequence; any thread may call.

    matcher: the grammar at the beginning of the output; None = the output has no grammar. Forbidden drafts are removed,
    and masks made, on a thread of the run's own, since all requests share the engine's.
    after_pass: has a function called on the engine's thread once all calls of a pass have been answered, so that the
    drafts of all runs share the passes of their drafters.
    hold_s: returns how long steps are collected before they are answered, unless the run has stopped.
    deadline_s: the request's deadline; `Runs` sets it before other threads see the run. request: the first call.
    Invariant: the caller gets every step once and in order; a `take` is answered by the run's deadline. An error is
    delivered after the steps before it, and closes the run.
    """

    def __init__(
        self,
        request: StepRequest,
        options: RunOptions,
        proposer: Proposer,
        matcher: Matcher | None,
        after_pass: Callable[[Callable[[], None]], None],
        hold_s: Callable[[], float],
    ) -> None:
        self.deadline_s = 0.0
        self._after_pass = after_pass
        self.request, self._options, self._proposer, self._hold_s = request, options, proposer, hold_s
        self._matcher, self._guide_s = matcher, 0.0
        context = Context(request.delta.context_ids.tolist())
        context.prompt_len = request.delta.prompt_len
        self._drafting = Drafting(context, request.sampling, options.limits, proposer, request.options)
        self._next = self._drafting.propose()  # reads the prompt, which is too slow for the engine's thread
        self._num_taken = len(context)
        self._ready: list[Step] = []
        self._caller: Reply | None = None
        self._error: ServingError | None = None
        self._is_busy = False  # from the call of a step until the next tree has been proposed
        self._has_ended = self._is_closed = False
        self._called_s = self._answered_s = 0.0  # when the step was called; when the caller was last answered
        self._lock = threading.RLock()  # reentrant: an engine that has stopped answers from within `submit`

    def begin(self, engine: TargetThread, deliver: Deliver, failed: Callable[[Run], None], caller: Reply) -> None:
        """Run the first step and answer `caller` with it. failed: called after the run has answered with an error."""
        with self._lock:
            self._engine, self._deliver, self._failed, self._caller = engine, deliver, failed, caller
            if self._is_closed:  # just released, or replaced by a new run
                self._reply(Unavailable(RELEASED))
            else:
                self._call(0)

    def take(self, prefix_len: int, caller: Reply) -> None:
        """Answer `caller` with the next steps; prefix_len: the number of tokens that it has."""
        with self._lock:
            if self._caller or self._is_closed:
                self._deliver(caller, Unavailable(f"sequence {self.request.delta.sequence_id} has a call under way"))
            elif prefix_len != self._num_taken or (self._has_ended and not self._ready):
                self._deliver(caller, UnknownSequence(f"a run after {prefix_len} tokens"))
            else:
                self._caller = caller
                self._go_on()

    @property
    def output_taken(self) -> list[int]:
        """The tokens that the caller has taken so far."""
        context = self._drafting.context
        return context.ids[context.prompt_len : self._num_taken]

    def answer_if_due(self) -> None:
        """Answer the caller if the hold is over, since the next step may be waiting for blocks or for its grammar."""
        if self._caller and self._ready:  # checked again under the lock
            with self._lock:
                if self._is_due:
                    self._answer()

    def close(self) -> None:
        """Run no more steps; further calls do nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._caller:
                self._reply(Unavailable(RELEASED))
            if not self._is_busy:  # otherwise the engine's thread closes it
                self._proposer.close()

    def _call(self, start: int) -> None:
        """Run the next step. start: the first position whose token the engine lacks. Caller holds the lock."""
        self._is_busy, self._called_s = True, time.monotonic()
        if self._matcher is None:
            self._submit(start, self._next[0])
        else:
            self._engine.guide(partial(self._guided, self._matcher), partial(self._submit_guided, start))

    def _guided(self, matcher: Matcher) -> tuple[Proposal, BoolArray]:
        """Return the drafts that the grammar allows, and their masks; runs on a thread of the run's own."""
        began_s, (proposal, options) = time.monotonic(), self._next
        matcher.follow(self._drafting.context.output)
        proposal = legal_drafts(matcher, proposal, self.request.sampling, options)
        legal = matcher.legal_rows(proposal.tree)
        self._guide_s = time.monotonic() - began_s
        return proposal, legal

    def _submit_guided(self, start: int, guided: tuple[Proposal, BoolArray] | ServingError) -> None:
        with self._lock:
            if not (self._is_closed or isinstance(guided, ServingError)):
                self._submit(start, *guided)
                return
        self._answered(Proposal.empty(), guided if isinstance(guided, ServingError) else Unavailable(RELEASED))

    def _submit(self, start: int, proposal: Proposal, legal: BoolArray | None = None) -> None:
        """Submit the next step; legal: its masks, if there is a grammar. Caller holds the lock."""
        options = self._next[1]
        first, context = self.request.delta, self._drafting.context
        delta, sampling = delta_of(context, start, first.sequence_id, first.cache_salt), self.request.sampling
        q, max_len = proposal.q if sampling.rule.uses_q else (), self.request.max_len
        request = StepRequest(delta, proposal.tree, sampling, options, 0, q, None, max_len)
        if legal is not None:
            request = GuidedStep(**vars(request), legal=legal)
        elif start:
            request = self._with_burst(request, proposal)
        self._engine.submit(request, self.deadline_s, partial(self._answered, proposal))

    def _with_burst(self, request: StepRequest, proposal: Proposal) -> StepRequest:
        """Return the request, allowing more steps after it without another proposal where that is possible."""
        proposer, context, run = self._drafting.proposer, self._drafting.context, self._options
        drafts, max_steps = proposer.native_drafts, MAX_AHEAD - len(self._ready)
        if drafts is None:
            max_steps = min(max_steps, proposal.num_plain)
        if not max_steps or request.options != (drafts.options if drafts else StepOptions()):
            return request
        max_tokens = run.limits.budget(context).max_depth + 1
        min_tokens = run.min_tokens - (len(context) - context.prompt_len)
        return BurstRequest(
            **vars(request),
            max_steps=max_steps,
            limit_s=self._hold_s(),
            continuation=Continuation(max_tokens, max(min_tokens, 0), run.stop_ids, drafts),
            sources=proposal.sources,
        )

    def _answered(self, proposal: Proposal, answer: Acceptance | list[Step] | ServingError) -> None:
        """Note the answer to one or several steps, on the engine's thread; the next tree is proposed after the pass."""
        with self._lock:
            if isinstance(answer, ServingError):
                self._error = answer
            elif isinstance(answer, list):
                self._attempt(partial(self._note_several, answer))
            else:
                self._attempt(partial(self._note, proposal, answer))
        if self._is_closed or self._has_stopped:
            self._proposed()
        else:
            self._attempt(self._drafting.begin)
            # A reader is waiting for the first token, and should not have to wait for a slow draft or grammar.
            if not self._answered_s or self._drafting.draft_s + self._guide_s >= self._hold_s():
                with self._lock:
                    self._answer()
            self._after_pass(self._propose)

    def _propose(self) -> None:
        """Propose the next tree and submit its step, on the engine's thread.

        Proposing does not hold the lock, so `take` and `close` never wait for a drafter.
        """
        self._attempt(self._set_next)
        self._proposed()

    def _set_next(self) -> None:
        self._next = self._drafting.propose()

    def _proposed(self) -> None:
        with self._lock:
            self._is_busy = False
            if self._is_closed:
                self._proposer.close()
            else:
                self._go_on()

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            log.exception("a run failed after its step")
            self._error = EngineError("the run failed; the server's log has the cause")

    def _note(self, proposal: Proposal, answer: Acceptance) -> None:
        step = Step(proposal, answer, self._drafting.draft_s, time.monotonic() - self._called_s)
        self._drafting.commit([step])
        self._ready.append(step)
        self._has_ended = self._ends_after(step.tokens)

    def _note_several(self, steps: list[Step]) -> None:
        """Note the steps of a burst; only the last one can end the run."""
        call_s = (time.monotonic() - self._called_s - sum(step.draft_s + step.target_s for step in steps)) / len(steps)
        steps[0] = steps[0]._replace(draft_s=self._drafting.draft_s)
        self._drafting.commit(steps)
        self._ready += [step._replace(target_s=step.target_s + call_s) for step in steps]
        self._has_ended = self._ends_after(steps[-1].tokens)

    def _ends_after(self, tokens: list[int]) -> bool:
        """Return whether the run ends with the tokens that were committed last."""
        context = self._drafting.context
        num_output = len(context) - context.prompt_len
        ends = (
            number > self._options.min_tokens and token in self._options.stop_ids
            for number, token in enumerate(tokens, start=num_output - len(tokens) + 1)
        )
        return num_output >= self._options.limits.max_tokens or any(ends)

    @property
    def _has_stopped(self) -> bool:
        return self._has_ended or self._error is not None

    @property
    def _is_due(self) -> bool:
        return time.monotonic() - self._answered_s >= self._hold_s()

    def _go_on(self) -> None:
        """Run the next step unless the run is too far ahead, and answer the caller if due. Caller holds the lock."""
        if not (self._has_stopped or self._is_busy) and len(self._ready) < MAX_AHEAD:
            self._call(len(self._drafting.context) - 1)
        if not self._is_busy or self._is_due:
            self._answer()

    def _answer(self) -> None:
        """Answer the caller, if there is one, with the steps that it does not have yet. Caller holds the lock."""
        if not self._caller:
            return
        if self._ready:
            self._reply(self._ready)
            self._num_taken += sum(step.acceptance.num_tokens for step in self._ready)
            self._ready = []
        elif self._error:
            self._reply(self._error)
            self.close()
            self._failed(self)

    def _reply(self, answer: Answer) -> None:
        assert self._caller is not None
        self._deliver(self._caller, answer)
        self._caller, self._answered_s = None, time.monotonic()
