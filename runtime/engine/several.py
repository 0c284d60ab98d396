"""Several steps of a call in native code: how they go on, and when they are answered.

What comes in between, such as a new prompt, ends the steps of all. They go on behind it without being answered first:
for many sequences, an answer and the next proposal take Python as long as a pass.
"""

from __future__ import annotations

from typing import NamedTuple

from orchestrator.core.proposal import Proposal, Step
from orchestrator.core.sampling_params import Rule
from orchestrator.core.types import Acceptance, PassLoad
from orchestrator.native.sampling import sampler
from orchestrator.wire.target import StepRequest
from runtime.engine.calls import EngineCall, SeveralSteps, StepsMade
from runtime.kv.batch import STEP_TOKENS, Segment
from runtime.native.decoding import Continuation, DecodedSteps, Draft

StepCall = EngineCall[StepRequest]
#: The calls of a pass, and what it computes of each.
Planned = list[tuple[StepCall, Segment]]

#: A step that Python decides has a pass apart from so many that native code makes: a pass more is cheaper than they
#: are to answer.
NATIVE_PER_STEP = 3


class GoingOn(NamedTuple):
    """What native code may still do for a call. limit_s: the time after which no step begins."""

    continuation: Continuation
    max_steps: int
    limit_s: float


def is_native(request: StepRequest) -> bool:
    """Return whether native code can decide a step and go on behind it without asking Python."""
    sampling = request.sampling
    follows_rule = sampling.rule in (Rule.COUPLED, Rule.ENGINE) and not (sampling.needs_logits_processors or request.q)
    return isinstance(request, SeveralSteps) and follows_rule


def is_step(call: StepCall) -> bool:
    """Return whether a call that holds a sequence has no more to compute than its root and its tree.

    A sequence's first call reads a prompt, and one that has lost its blocks reads its context.
    """
    sequence = call.sequence
    return bool(call.delta.context_start and sequence and len(sequence.ids) - sequence.num_computed == 1)


def is_short(call: StepCall) -> bool:
    """Return whether a call is a step whose pass takes no longer than steps do: its draft is not large."""
    return is_step(call) and draft_of(call).tree.num_nodes <= STEP_TOKENS


def apart(steps: Planned) -> tuple[Planned, Planned]:
    """Return the steps of one pass, and those that Python decides if they are few enough to have another."""
    native, few = ([each for each in steps if is_native(each[0].request) is wanted] for wanted in (True, False))
    return (native, few) if sampler() and len(native) >= NATIVE_PER_STEP * len(few) else (steps, [])


def has_prompts(planned: Planned) -> bool:
    """Return whether some of the calls read a prompt, or a part of one."""
    return not all(is_step(call) for call, _ in planned)


def going_on(call: StepCall, segment: Segment, now_s: float) -> GoingOn | None:
    """Return how native code can go on behind the steps that it has made for a call; None: it cannot make any."""
    request = call.request
    is_one_row = segment.first + 1 == segment.last == len(call.opened.ids)
    if not (isinstance(request, SeveralSteps) and is_native(request) and is_one_row):
        return None
    further, made = request.further, call.made
    if made is None:
        return GoingOn(further, request.max_steps, request.limit_s)
    max_tokens, min_tokens = further.max_tokens - made.num_tokens, max(further.min_tokens - made.num_tokens, 0)
    further = further._replace(max_tokens=max_tokens, min_tokens=min_tokens)
    return GoingOn(further, request.max_steps - len(made.steps), made.answer_by_s - now_s)


def draft_of(call: StepCall) -> Draft:
    """Return what the call's next step verifies."""
    return call.made.draft if call.made else Draft(call.request.tree, [])


def note(call: StepCall, decoded: DecodedSteps, loads: list[PassLoad], began_s: float, now_s: float) -> None:
    """Note the steps that native code has made for a call; answer it if none can follow.

    loads: of their passes. began_s: when they began.
    """
    request = call.request
    assert isinstance(request, SeveralSteps)
    # A call with steps is not refused when it is late, so it is answered by its deadline.
    answer_by_s = min(began_s + request.limit_s, call.deadline_s)
    made = call.made or StepsMade(decoded.draft, answer_by_s, noted_s=call.arrived_s)
    made.steps += _steps(call, decoded, loads, began_s - made.noted_s)
    made.num_tokens += sum(len(step.path) + 1 for step in decoded.steps)
    made.draft, made.noted_s, call.made = decoded.draft, now_s, made
    if decoded.is_over or len(made.steps) >= request.max_steps:
        call.answer_made()


def not_due(planned: Planned, at_s: float) -> Planned:
    """Answer the calls with steps whose hold will be over at a certain time; return the others."""
    for call, _ in planned:
        answer_if_due(call, at_s)
    return [each for each in planned if not each[0].answered]


def answer_if_due(call: StepCall, at_s: float) -> None:
    """Answer a call with the steps that are made for it, if its hold will be over at a certain time."""
    if call.made and call.made.answer_by_s <= at_s:
        call.answer_made()


def _steps(call: StepCall, decoded: DecodedSteps, loads: list[PassLoad], waited_s: float) -> list[Step]:
    """Return the steps that native code has made for a call. waited_s: how long they waited for their first pass."""
    request, steps, num_in_pass = call.request, list[Step](), loads[0].num_steps + loads[0].num_beside
    assert isinstance(request, SeveralSteps)
    queue_us, sources = int(1e6 * waited_s), request.sources  # those of the call, unless native code has drafted
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
            num_beside=load.num_beside,
        )
        if names and request.further.drafts:
            sources = tuple(request.further.drafts.sources[bits] for bits in names)
        proposal = Proposal(tree, sources) if tree.num_nodes else Proposal.empty()
        step_s = 1e-6 * (step.pass_us + step.verify_us)
        steps.append(Step(proposal, acceptance, draft_s, step_s))
        queue_us, sources = 0, ()
    return steps
