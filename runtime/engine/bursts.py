"""The calls that native code serves in bursts: how a burst continues, and when its steps are answered.

A new prompt interrupts the burst. Afterwards the burst resumes, without an answer in between: for many sequences,
answering and proposing take Python as long as a pass.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

from orchestrator.core.messages.target import StepRequest
from orchestrator.core.proposal import Proposal, Step
from orchestrator.core.sampling_params import Rule
from orchestrator.core.types import Acceptance, PassLoad
from runtime.engine.calls import BurstRequest, EngineCall, FinishedSteps
from runtime.engine.kv.batch import Segment
from runtime.engine.kv.groups import STEP_TOKENS
from runtime.engine.schedule import Kind, Part
from runtime.models.native.decoding import Continuation, DecodedSteps, Draft

StepCall = EngineCall[StepRequest]
#: The calls of a pass, each with the part that the pass computes.
Planned = list[tuple[StepCall, Segment]]


class Burst(NamedTuple):
    """What native code may still do for a call. limit_s: seconds from now after which no step begins."""

    continuation: Continuation
    max_steps: int
    limit_s: float


def is_native(request: StepRequest) -> bool:
    """Return whether native code can decide a step and continue after it without asking Python."""
    sampling = request.sampling
    follows_rule = sampling.rule in (Rule.COUPLED, Rule.ENGINE) and not (sampling.needs_logits_processors or request.q)
    return isinstance(request, BurstRequest) and follows_rule


def kind_of(call: StepCall) -> Kind:
    """Return what the next part of a call computes.

    The first call of a sequence reads a prompt, and a sequence that has lost its blocks reads its whole context.
    """
    sequence = call.sequence
    if not (call.delta.context_start and sequence and len(sequence.ids) - sequence.num_computed == 1):
        return Kind.PROMPT
    if draft_of(call).tree.num_nodes > STEP_TOKENS:
        return Kind.LARGE
    return Kind.NATIVE if is_native(call.request) else Kind.PYTHON


def parts_of(planned: Planned) -> list[Part[tuple[StepCall, Segment]]]:
    """Return the parts of a plan as the scheduler sees them."""
    return [
        Part((call, segment), kind_of(call), call.finished.answer_by_s if call.finished else math.inf)
        for call, segment in planned
    ]


def burst_of(call: StepCall, segment: Segment, now_s: float) -> Burst | None:
    """Return what native code may do for a call after the steps that it has run so far; None: nothing."""
    request = call.request
    is_one_row = segment.first + 1 == segment.last == len(call.opened.ids)
    if not (isinstance(request, BurstRequest) and is_native(request) and is_one_row):
        return None
    continuation, finished = request.continuation, call.finished
    if finished is None:
        return Burst(continuation, request.max_steps, request.limit_s)
    continuation = continuation._replace(
        max_tokens=continuation.max_tokens - finished.num_tokens,
        min_tokens=max(continuation.min_tokens - finished.num_tokens, 0),
    )
    return Burst(continuation, request.max_steps - len(finished.steps), finished.answer_by_s - now_s)


def draft_of(call: StepCall) -> Draft:
    """Return the draft that the call's next step verifies."""
    return call.finished.draft if call.finished else Draft(call.request.tree, [])


def note(call: StepCall, decoded: DecodedSteps, loads: list[PassLoad], began_s: float, now_s: float) -> None:
    """Note the steps that native code has run for a call; answer it if no more can follow.

    loads: the load of each step's pass. began_s: when the steps began.
    """
    request = call.request
    assert isinstance(request, BurstRequest)
    # A call that has steps is never refused for being late, so it must be answered by its deadline.
    answer_by_s = min(began_s + request.limit_s, call.deadline_s)
    finished = call.finished or FinishedSteps(decoded.draft, answer_by_s, noted_s=call.arrived_s)
    finished.steps += _steps(call, decoded, loads, began_s - finished.noted_s)
    finished.num_tokens += sum(len(step.path) + 1 for step in decoded.steps)
    finished.draft, finished.noted_s, call.finished = decoded.draft, now_s, finished
    if decoded.is_over or len(finished.steps) >= request.max_steps:
        call.answer_finished()


def answer_if_due(call: StepCall, at_s: float) -> None:
    """Answer a call with the steps run for it, if there are any and its hold will be over at at_s."""
    if call.finished and call.finished.answer_by_s <= at_s:
        call.answer_finished()


def _steps(call: StepCall, decoded: DecodedSteps, loads: list[PassLoad], waited_s: float) -> list[Step]:
    """Return the steps that native code has run for a call. waited_s: how long the call waited for the first pass."""
    request, steps, num_in_pass = call.request, list[Step](), loads[0].num_steps + loads[0].num_in_separate_pass
    assert isinstance(request, BurstRequest)
    queue_us, sources = int(1e6 * waited_s), request.sources  # of the first tree, unless native code drafted it
    # Thousands of nodes have the same few names.
    drafts = request.continuation.drafts
    source_of = cache(drafts.source_of) if drafts else None
    for step, load in zip(decoded.steps, loads, strict=True):
        tree, names, draft_s = step.draft
        acceptance = Acceptance(
            step.path,
            step.next_token,
            queue_us=queue_us,
            forward_us=step.pass_us,
            verify_us=step.verify_us,
            num_in_pass=num_in_pass,
            num_cached_tokens=call.opened.num_cached,
            load=load,
            num_in_separate_pass=load.num_in_separate_pass,
        )
        if names and source_of:
            sources = tuple(map(source_of, names))
        proposal = Proposal(tree, sources) if tree.num_nodes else Proposal.empty()
        step_s = 1e-6 * (step.pass_us + step.verify_us)
        steps.append(Step(proposal, acceptance, draft_s, step_s, drafts is not None))
        queue_us, sources = 0, ()
    return steps
