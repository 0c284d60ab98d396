"""Runs of an engine, against the loop that calls the engine for each step."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from native.response_memory import NativeMemory
from orchestrator.core.context import Context
from orchestrator.core.drafting import Limits
from orchestrator.core.errors import EngineError, RequestError, ServingError, Unavailable, UnknownSequence
from orchestrator.core.messages.checks import check_steps, checked_target_call
from orchestrator.core.messages.codec import decode_answer, decode_call, encode_answer, encode_call
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.run import RunOptions, TakeSteps
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.proposal import Budget, NativeDrafts, Proposal, Proposer, Step
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.types import StepOptions
from orchestrator.drafting.guarded import Guarded
from orchestrator.drafting.registry import SelectedMethod, select_method
from orchestrator.server.loop import SequenceState, StepByStep, Steps, StepsOfRun, generate
from orchestrator.server.step_trace import Trace
from orchestrator.server.text import Chunk, FinishReason, Output, StopRule
from runtime.engine.calls import BurstRequest
from runtime.engine.run import MAX_AHEAD
from runtime.engine.runs import MAX_HOLD_S, Runs
from tests.support import decode as support
from tests.support.engines import LIMIT_S, EngineTarget, make_paged, start_target
from tests.support.tiny_models import VOCAB_SIZE

PROMPT = [5, 9, 3, 5, 9, 3, 5, 9]
MAX_TOKENS = 48
LIMITS = Limits(MAX_TOKENS, 512, 32)
METHODS = (
    ("none", "{}"),
    ("prompt_lookup", '{"branches": 2}'),
    ("suffix", "{}"),
    ("ngram", '{"draft_len": 3}'),
    ("lookahead", "{}"),
    ("jacobi", "{}"),
    ("recycling", '{"max_nodes": 16}'),
    ("predicted", "{}"),
    ("prompt_lookup+suffix", '{"max_nodes": 12, "suffix": {"max_depth": 8}}'),
)
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.9, top_p=0.95, seed=7, repetition_penalty=1.2),
    Sampling(temperature=1.0, seed=3, rule=Rule.REJECTION),
)


class Proposers:
    """Builds the proposers that a test wants, and notes the outputs of the runs that have ended, with their salts."""

    def __init__(self, served: Served) -> None:
        self.served = served

    def __call__(self, request: StepRequest) -> Proposer:
        return self.served.wrap(self.served.proposer(*_named(request)))

    def ended(self, request: StepRequest, output: Sequence[int]) -> None:
        self.served.ended.append((request.delta.cache_salt, [*output]))


class Served:
    """A target's engine with runs; calls and answers cross as messages."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.engine = start_target(make_paged(folder, **options))
        self.memory = NativeMemory(1000)
        self.memory.learn("", [1, 2, 3, 5, 9, 3, 7, 8, 9, 10, 5, 9, 4])
        self.wrap: Callable[[Proposer], Proposer] = lambda proposer: proposer
        self.ended: list[tuple[str, list[int]]] = []
        self.runs = Runs(self.engine, Proposers(self))
        self.num_calls = 0

    def proposer(self, method: str, config: str, prediction: tuple[int, ...]) -> Proposer:
        dependencies = support.dependencies(
            vocab_size=VOCAB_SIZE, memory=self.memory.of(""), prediction=prediction, max_nodes=LIMITS.max_nodes
        )
        return select_method(method, config, frozenset(), {}).proposer(dependencies)

    def call(self, call: StepRequest | TakeSteps) -> list[Step]:
        """Answer a call as the target's host does."""
        self.num_calls += 1
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        request = checked_target_call(decode_call(encode_call(call, ""), ""), VOCAB_SIZE, LIMITS.max_nodes)
        if work := self.runs.preparation(request):
            work()
        self.runs.submit(request, time.monotonic() + LIMIT_S, answers.put)
        answer = answers.get(timeout=LIMIT_S)
        if isinstance(answer, ServingError):
            raise answer
        steps = decode_answer(encode_answer(answer), list[Step])
        check_steps(steps)
        return steps

    def begin(self, sequence_id: int, context: Context, sampling: Sampling, options: StepOptions, run: Any) -> Any:
        delta = delta_of(context, 0, sequence_id, "")
        return self.call(StepRequest(delta, support.TokenTree.bare(), sampling, options, 60_000, (), run))

    def watch_bursts(self, note: Callable[[NativeDrafts, list[Step]], None]) -> None:
        """Call `note` with the drafts and the steps of each answered burst whose drafts native code makes."""
        submit = self.engine.submit

        def watched(request: StepRequest, deadline_s: float, on_answer: Any) -> None:
            def noted(answer: Any) -> None:
                drafts = request.continuation.drafts if isinstance(request, BurstRequest) else None
                if drafts and isinstance(answer, list):
                    note(drafts, answer)
                on_answer(answer)

            submit(request, deadline_s, noted)

        self.engine.submit = watched  # type: ignore[method-assign]

    def generate_text(self, folder: Path, number: int, sampling: Sampling, run: RunOptions, stop: StopRule) -> Any:
        """Return the text of a run and its figures, and release the run."""
        sequence = sequence_of(folder, sampling, stop, StepOptions())
        try:
            return generate_text(sequence, StepsOfRun(sequence, Caller(self, number, sequence, run)))
        finally:
            self.runs.release(number)


def _named(request: StepRequest) -> tuple[str, str, tuple[int, ...]]:
    assert request.run is not None
    return request.run.method, request.run.config, request.run.prediction


class Caller:
    """Takes the steps of one run; begins it anew when the engine has lost it, as BlsTargetClient does."""

    def __init__(self, served: Served, sequence_id: int, sequence: SequenceState, run: RunOptions) -> None:
        self.served, self.id, self.sequence, self.run, self.has_begun = served, sequence_id, sequence, run, False

    def __call__(self) -> list[Step]:
        context = self.sequence.context
        try:
            if self.has_begun:
                return self.served.call(TakeSteps(self.id, len(context)))
        except UnknownSequence:
            pass
        self.has_begun = True
        sequence = self.sequence
        return self.served.begin(self.id, context, sequence.sampling, sequence.options, self.run)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    made = Served(folder)
    yield made
    made.runs.close()


@pytest.fixture(autouse=True)
def plain_proposers(served: Served) -> None:
    served.wrap = lambda proposer: proposer


def sequence_of(folder: Path, sampling: Sampling, stop: StopRule, options: StepOptions) -> SequenceState:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    context = Context(PROMPT)
    output = Output(tokenizer, PROMPT, stop)
    return SequenceState(context, sampling, LIMITS, output, options, trace=Trace(context, sampling))


def run_of(method: str, config: str, stop: StopRule) -> RunOptions:
    plan: SelectedMethod = select_method(method, config, frozenset(), {})
    prediction = (9, 3, 11, 12) if method == "predicted" else ()
    return RunOptions(method, plan.config_json, LIMITS, stop.min_tokens, tuple(stop.ids), prediction)


def generate_text(sequence: SequenceState, steps: Steps, guard: Any = lambda: None) -> tuple[Chunk, dict[str, Any]]:
    """Return all chunks as one, and everything else that a client may be told except times."""
    whole = Chunk("", [], [])
    generate(sequence, steps, guard, whole.extend)
    statistics = sequence.statistics.to_dict()
    kept = {name: statistics[name] for name in ("num_steps", "acceptance_length", "sources", "depths")}
    kept["step_lengths"] = sequence.statistics.step_lengths
    assert sequence.trace is not None
    return whole, kept | {"trace": json.dumps(sequence.trace.to_dict()), "finish": sequence.output.finish}


def both(
    served: Served,
    folder: Path,
    method: tuple[str, str],
    sampling: Sampling,
    stop: StopRule,
    options: StepOptions,
    run: RunOptions | None = None,
) -> tuple[Any, Any]:
    """Return what the loop tells with a run, and what it tells step by step."""
    run = run or run_of(*method, stop)
    sequence = sequence_of(folder, sampling, stop, options)
    in_run = generate_text(sequence, StepsOfRun(sequence, Caller(served, 11, sequence, run)))
    served.runs.release(11)
    sequence = sequence_of(folder, sampling, stop, options)
    proposer = served.proposer(run.method, run.config, run.prediction)
    by_step = generate_text(sequence, StepByStep(sequence, EngineTarget(served.engine, 12), proposer))
    served.runs.release(12)
    return in_run, by_step


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=("greedy", "sampled", "rejection"))
@pytest.mark.parametrize("method", METHODS, ids=[name for name, _ in METHODS])
def test_a_run_tells_what_the_loop_tells_step_by_step(
    served: Served, folder: Path, method: tuple[str, str], sampling: Sampling
) -> None:
    in_run, by_step = both(
        served, folder, method, sampling, StopRule(MAX_TOKENS), StepOptions(logprobs=True, num_top=2)
    )
    assert in_run == by_step
    assert len(by_step[1]["step_lengths"]) > 1 and by_step[1]["finish"] is FinishReason.LENGTH


@pytest.mark.parametrize("min_tokens", (0, 20))
def test_a_run_ends_at_a_stop_id_and_goes_on_behind_a_stop_that_does_not_count(
    served: Served, folder: Path, min_tokens: int
) -> None:
    free = both(served, folder, METHODS[1], SAMPLINGS[1], StopRule(MAX_TOKENS), StepOptions())[1]
    stop = StopRule(MAX_TOKENS, frozenset({free[0].ids[-3]}), (), min_tokens)
    in_run, by_step = both(served, folder, METHODS[1], SAMPLINGS[1], stop, StepOptions())
    assert in_run == by_step and by_step[1]["finish"] is FinishReason.STOP


def test_a_stop_string_ends_the_output_though_the_engine_does_not_know_it(served: Served, folder: Path) -> None:
    free = both(served, folder, METHODS[0], SAMPLINGS[1], StopRule(MAX_TOKENS), StepOptions())[1]
    text = free[0].text
    in_run, by_step = both(
        served, folder, METHODS[0], SAMPLINGS[1], StopRule(MAX_TOKENS, strings=(text[20:23],)), StepOptions()
    )
    assert in_run == by_step and by_step[1]["finish"] is FinishReason.STOP


def test_a_run_waits_for_a_caller_that_stays_away_and_goes_on_when_it_returns(served: Served, folder: Path) -> None:
    stop = StopRule(MAX_AHEAD + 8)
    sequence = sequence_of(folder, Sampling(), stop, StepOptions())
    run = run_of(*METHODS[0], stop)
    caller = Caller(served, 21, sequence, replace(run, limits=replace(run.limits, max_tokens=stop.max_tokens)))
    first = caller()
    limit_s = time.monotonic() + LIMIT_S
    before = -1
    while served.engine.num_passes != before and time.monotonic() < limit_s:  # until no more passes run
        before = served.engine.num_passes
        time.sleep(0.3)
    for step in first:
        sequence.context.commit(step.tokens)
    ahead = caller()
    assert len(ahead) == MAX_AHEAD
    for step in ahead:
        sequence.context.commit(step.tokens)
    assert caller()
    served.runs.release(21)


def test_a_released_run_makes_no_further_step_and_answers_its_caller(served: Served, folder: Path) -> None:
    sequence = sequence_of(folder, Sampling(), StopRule(MAX_TOKENS), StepOptions())
    Caller(served, 31, sequence, run_of(*METHODS[0], StopRule(MAX_TOKENS)))()
    served.runs.release(31)
    with pytest.raises(UnknownSequence):
        served.call(TakeSteps(31, len(PROMPT) + 1))


def test_a_lost_sequence_goes_on_from_the_tokens_that_the_caller_has(served: Served, folder: Path) -> None:
    stop = StopRule(MAX_TOKENS)
    truth = both(served, folder, METHODS[1], SAMPLINGS[1], stop, StepOptions())[1]
    sequence = sequence_of(folder, SAMPLINGS[1], stop, StepOptions())
    caller = Caller(served, 41, sequence, run_of(*METHODS[1], stop))
    num_left = iter((3, 2, 1))

    def lose() -> None:
        if next(num_left, 0):
            served.runs.release(41)

    whole, _ = generate_text(sequence, StepsOfRun(sequence, caller), lose)
    assert whole.ids == truth[0].ids


class Raising(Proposer):
    """Raises at its third proposal."""

    name = "raising"

    def __init__(self, inner: Proposer) -> None:
        self.inner, self.num_proposals = inner, 0

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        self.num_proposals += 1
        if self.num_proposals == 3:
            raise ValueError("planted")
        return self.inner.propose(context, sampling, budget)


class Slow(Raising):
    """Takes its time at its third proposal."""

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        self.num_proposals += 1
        if self.num_proposals == 3:
            time.sleep(0.8)
        return self.inner.propose(context, sampling, budget)


@pytest.mark.parametrize("fault", (Raising, Slow))
def test_a_proposer_that_raises_or_is_slow_costs_the_drafts_not_the_text(
    served: Served, folder: Path, fault: type[Raising]
) -> None:
    stop = StopRule(MAX_TOKENS)
    truth = both(served, folder, METHODS[1], Sampling(), stop, StepOptions())[1]
    made: list[Raising] = []

    def wrap(proposer: Proposer) -> Proposer:
        made.append(fault(proposer))
        return Guarded(made[0], VOCAB_SIZE, limit_s=0.5)

    served.wrap = wrap
    sequence = sequence_of(folder, Sampling(), stop, StepOptions())
    whole, _ = generate_text(sequence, StepsOfRun(sequence, Caller(served, 51, sequence, run_of(*METHODS[1], stop))))
    served.runs.release(51)
    assert whole.ids == truth[0].ids
    assert made[0].num_proposals == 3


def test_a_loop_that_fails_in_the_engine_answers_its_caller(served: Served, folder: Path) -> None:
    """An unguarded proposer stands for an error of our own."""
    served.wrap = Raising
    sequence = sequence_of(folder, Sampling(), StopRule(MAX_TOKENS), StepOptions())
    with pytest.raises(EngineError, match="the run failed"):
        generate_text(
            sequence,
            StepsOfRun(sequence, Caller(served, 61, sequence, run_of(*METHODS[0], StopRule(MAX_TOKENS)))),
        )
    assert sequence.output.num_tokens == 2  # the steps before it were delivered
    served.runs.release(61)


def test_a_method_that_lacks_its_data_is_refused(served: Served, folder: Path) -> None:
    def refuse(proposer: Proposer) -> Proposer:
        raise RequestError("no tables")

    served.wrap = refuse
    sequence = sequence_of(folder, Sampling(), StopRule(MAX_TOKENS), StepOptions())
    with pytest.raises(RequestError, match="no tables"):
        Caller(served, 71, sequence, run_of(*METHODS[0], StopRule(MAX_TOKENS)))()


def first_step(sequence_id: int, max_len: int = 0) -> StepRequest:
    """Return the call that begins a run."""
    delta = delta_of(Context(PROMPT), 0, sequence_id, "")
    run = run_of("none", "{}", StopRule(MAX_TOKENS))
    return StepRequest(delta, support.TokenTree.bare(), Sampling(), StepOptions(), 60_000, (), run, max_len)


def test_a_run_whose_later_step_fails_is_forgotten_when_its_caller_knows(served: Served) -> None:
    served.wrap = Raising
    served.call(first_step(92))
    taken = len(PROMPT) + 1
    with pytest.raises(EngineError, match="the run failed"):
        while True:
            taken += sum(len(step.tokens) for step in served.call(TakeSteps(92, taken)))
    assert 92 not in served.runs._runs
    served.runs.release(92)


def test_two_takes_at_once_are_refused(served: Served, folder: Path) -> None:
    sequence = sequence_of(folder, Sampling(), StopRule(MAX_TOKENS), StepOptions())
    Caller(served, 81, sequence, run_of(*METHODS[0], StopRule(MAX_TOKENS)))()
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    run = served.runs._runs[81]
    with run._lock:  # as if a step were under way
        run._is_busy, run._ready, run._caller = True, [], answers.put
        run.take(len(PROMPT), answers.put)
    assert isinstance(answers.get(timeout=LIMIT_S), Unavailable)
    served.runs.release(81)


class Gate(Proposer):
    """Drafts nothing; each proposal waits for a permit."""

    name = "gate"

    def __init__(self) -> None:
        self.permits = threading.Semaphore(1)  # the first proposal, before the run's first step

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        assert self.permits.acquire(timeout=LIMIT_S)
        time.sleep(2 * MAX_HOLD_S)
        return Proposal.empty()


def test_the_caller_gets_a_step_before_the_slow_draft_of_the_next_one(served: Served, folder: Path) -> None:
    gate = Gate()
    served.wrap = lambda proposer: gate
    sequence = sequence_of(folder, Sampling(), StopRule(MAX_TOKENS), StepOptions())
    take = Caller(served, 4711, sequence, run_of("none", "{}", StopRule(MAX_TOKENS)))
    try:
        (first,) = take()  # while the second proposal waits
        sequence.context.commit(first.tokens)
        gate.permits.release()
        (second,) = take()  # while the third one waits
        assert second.draft_s >= MAX_HOLD_S
    finally:
        gate.permits.release(MAX_TOKENS)
        served.runs.release(4711)
