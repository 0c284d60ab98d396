"""The main loop: step → text → emit, until the text ends. It knows neither Triton nor models."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from orchestrator.core.context import Context
from orchestrator.core.drafting import Drafting, Limits
from orchestrator.core.proposal import Proposer, Step
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.types import StepOptions, Target
from orchestrator.server.statistics import Statistics
from orchestrator.server.step_trace import Trace
from orchestrator.server.text import Chunk, FinishReason, Output

Guard = Callable[[], FinishReason | None]
Emit = Callable[[Chunk], None]


@dataclass
class SequenceState:
    """The state of one sequence in the loop.

    options: what the client needs from every step. trace: records the steps if the client asked for them.
    """

    context: Context
    sampling: Sampling
    limits: Limits
    output: Output
    options: StepOptions = field(default_factory=StepOptions)
    statistics: Statistics = field(default_factory=Statistics)
    trace: Trace | None = None


class Steps(Protocol):
    """Runs the steps of one sequence: one at a time from this process, or in a run of the target's process."""

    @property
    def num_ready(self) -> int:
        """Number of steps that `next` can return without waiting."""

    def next(self) -> Step:
        """Return the next step, whose tokens have been committed to the sequence's context."""

    def close(self) -> None:
        """Free what the sequence's proposer keeps for it."""


class StepByStep:
    """Proposes in this process, and calls the target for each step."""

    num_ready = 0

    def __init__(self, sequence: SequenceState, target: Target, proposer: Proposer) -> None:
        self._target = target
        self._drafting = Drafting(sequence.context, sequence.sampling, sequence.limits, proposer, sequence.options)

    def next(self) -> Step:
        """Propose a tree, have the target verify it, and commit what it accepts."""
        drafting = self._drafting
        proposal, options = drafting.propose()
        began_s = time.perf_counter()
        acceptance = self._target.step(drafting.context, proposal.tree, drafting.sampling, options, proposal.q)
        step = Step(proposal, acceptance, drafting.draft_s, time.perf_counter() - began_s)
        drafting.commit([step])
        return step

    def close(self) -> None:
        """Free what the proposer keeps for the sequence."""
        self._drafting.proposer.close()


class StepsOfRun:
    """Takes the steps that the target's engine has finished in a run, several at a time (docs/wire.md, Runs).

    take: returns the steps that follow the sequence's context, at least one.
    """

    def __init__(self, sequence: SequenceState, take: Callable[[], Sequence[Step]]) -> None:
        self._context, self._take = sequence.context, take
        self._steps: deque[Step] = deque()

    @property
    def num_ready(self) -> int:
        """Number of steps of the last call that `next` has not returned yet."""
        return len(self._steps)

    def next(self) -> Step:
        """Return the next step, and commit its tokens."""
        if not self._steps:
            self._steps.extend(self._take())
        step = self._steps.popleft()
        self._context.commit(step.tokens)
        return step

    def close(self) -> None:
        """Do nothing: releasing the sequence ends its run."""


def generate(sequence: SequenceState, steps: Steps, guard: Guard, emit: Emit) -> None:
    """Generate until the output finishes or `guard` returns a reason to stop; emit steps that arrive together at once.

    Invariant: under the rule `coupled`, the emitted tokens are those of
    `auditor.reference.decoding.generate`, whatever the proposer (other rules: docs/sampling.md, Rules).
    Source: Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1; trees: SpecInfer, arXiv:2305.09781.
    """
    output, statistics, chunk = sequence.output, sequence.statistics, Chunk("", [], [])
    while output.finish is None:
        if reason := guard():
            began_s = time.perf_counter()
            chunk.text += output.close(reason)
        else:
            step = steps.next()
            began_s = time.perf_counter()
            chunk.extend(_observe(sequence, step))
        if output.finish or not steps.num_ready:
            statistics.note_response(len(chunk.ids))
            emit(chunk)
            chunk = Chunk("", [], [])
        statistics.emit_s += time.perf_counter() - began_s


def _observe(sequence: SequenceState, step: Step) -> Chunk:
    """Count and record a step; return what its tokens add to the output."""
    acceptance, statistics = step.acceptance, sequence.statistics
    chunk = sequence.output.push(step.tokens, [] if acceptance.logprobs is None else acceptance.logprobs.tolist())
    chunk.top_ids, chunk.top_logprobs = acceptance.top_tokens(len(chunk.ids))
    statistics.observe(step.proposal, acceptance, len(chunk.ids), step.draft_s, step.target_s)
    # The context of a text that another server began has generated tokens too.
    statistics.num_cached_tokens = min(statistics.num_cached_tokens, sequence.context.prompt_len)
    if sequence.trace:
        sequence.trace.observe(step.proposal, acceptance)
    return chunk
