"""Several steps of native code that others interrupt: they go on unanswered, and are answered when they have to be.

The engine is asked for one pass at a time, and something always waits for it, so that each native call runs one step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from native.drafts import native_suffix
from native.drafts_library import SuffixOptions
from orchestrator.core.context import Context
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.proposal import NativeDrafts, Step
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, StepOptions
from runtime.engine.calls import BurstRequest, EngineCall
from runtime.engine.kv.groups import STEP_TOKENS
from runtime.engine.passes import Passes
from runtime.engine.target import StepCall, TargetEngine
from runtime.models.native.decoding import Continuation
from tests.support.engines import LIMIT_S, make_paged
from tests.unit.runtime.engine.test_runs import PROMPT

MAX_STEPS = 12
SOURCES = ("text",)


@pytest.fixture(scope="module")
def folder(native_folder: Path) -> Path:
    return native_folder


@dataclass
class Sequence:
    """One sequence of an engine that is asked for one pass at a time. answers: to its calls, in order."""

    engine: TargetEngine
    number: int
    context: Context = field(default_factory=lambda: Context(PROMPT))
    sampling: Sampling = field(default_factory=Sampling)
    answers: list[Any] = field(default_factory=list)

    def call(self, start: int) -> StepCall:
        delta = delta_of(self.context, start, self.number, "")
        request = StepRequest(delta, TokenTree.bare(), self.sampling, StepOptions(), 60_000)
        return EngineCall(request, time.monotonic() + LIMIT_S, self.answers.append)

    def begin(self) -> StepCall:
        """Return the call that reads the prompt."""
        return self.call(0)

    def large(self) -> StepCall:
        """Return the call of a step with a large draft after the first token."""
        call = self.single()
        tree = TokenTree.from_paths([[token] for token in range(STEP_TOKENS + 1)])
        call.request = replace(call.request, tree=tree)
        return call

    def single(self) -> StepCall:
        """Return a call of one step after the first token."""
        self.engine.advance([self.begin()])
        self.context.commit([self.answers[0].next_token])
        return self.call(len(self.context) - 1)

    def several(self, drafts: NativeDrafts | None = None, limit_s: float = LIMIT_S, **end: Any) -> StepCall:
        """Return a call of up to MAX_STEPS steps after the first token."""
        if not self.answers:
            self.engine.advance([self.begin()])
            self.context.commit([self.answers[0].next_token])
        call = self.call(len(self.context) - 1)
        continuation = Continuation(**{"max_tokens": 100, "drafts": drafts, **end})
        call.request = BurstRequest(
            **vars(call.request), max_steps=MAX_STEPS, limit_s=limit_s, continuation=continuation
        )
        return call

    @property
    def steps(self) -> list[Step]:
        """The steps that it was answered with."""
        assert isinstance(self.answers[1], list)
        return self.answers[1]

    @property
    def told(self) -> list[tuple[list[int], list[int], tuple[str, ...], tuple[int, ...], int]]:
        """The trees of these steps, their sources and what was accepted."""
        return [
            (*_lists(proposal.tree), proposal.sources, acceptance.path, acceptance.next_token)
            for proposal, acceptance, *_ in self.steps
        ]


def _lists(tree: TokenTree) -> tuple[list[int], list[int]]:
    return tree.tokens.tolist(), tree.parents.tolist()


@pytest.fixture
def engine(folder: Path) -> TargetEngine:
    made = TargetEngine(make_paged(folder, "float32", kernels="native"))
    made.progress.num_waiting.value = 1
    return made


@pytest.fixture
def uninterrupted(folder: Path) -> Callable[..., Sequence]:
    """Return a function that runs the steps of a call in one go."""

    def run(drafts: NativeDrafts | None = None, **end: Any) -> Sequence:
        sequence = Sequence(TargetEngine(make_paged(folder, "float32", kernels="native")), 1)
        call = sequence.several(drafts, **end)
        assert sequence.engine.advance([call]) == []
        return sequence

    return run


def suffix_drafts() -> NativeDrafts:
    """Return the drafts of `suffix` after the prompt, which the engine must be told of the first token."""
    proposer = native_suffix(SuffixOptions(8, 4, False, 4.0, 0.1))
    assert proposer
    proposer.next(PROMPT, 0, 0)
    return NativeDrafts(proposer, 4, 4, SOURCES, proposer.handle)


def advance_until_answered(engine: TargetEngine, call: StepCall, limit: int = 40) -> int:
    """Ask for passes until a call is answered; return how many it took."""
    for number in range(1, limit + 1):
        engine.advance([call])
        if call.answered:
            return number
    raise AssertionError(f"unanswered after {limit} passes")


def test_steps_go_on_behind_a_prompt_without_an_answer_in_between(
    engine: TargetEngine, uninterrupted: Callable[..., Sequence]
) -> None:
    sequence, other = Sequence(engine, 1), Sequence(engine, 2, Context([4, 4, 8]))
    call, prompt = sequence.several(), other.begin()
    assert engine.advance([call]) == [call]
    assert engine.advance([call, prompt]) == [call]
    assert isinstance(other.answers[0], Acceptance) and len(sequence.answers) == 1
    assert advance_until_answered(engine, call) == MAX_STEPS - 2
    assert sequence.told == uninterrupted().told


def test_trees_and_their_sources_are_those_of_uninterrupted_steps(
    engine: TargetEngine, uninterrupted: Callable[..., Sequence]
) -> None:
    sequence, others = Sequence(engine, 1), uninterrupted(suffix_drafts())
    assert advance_until_answered(engine, sequence.several(suffix_drafts())) == MAX_STEPS
    assert sequence.told == others.told
    assert {source for _, _, sources, _, _ in sequence.told for source in sources} == {"text"}
    assert sum(step.acceptance.num_tokens for step in sequence.steps) > MAX_STEPS


def test_steps_are_answered_when_their_hold_is_over(engine: TargetEngine) -> None:
    sequence = Sequence(engine, 1)
    call = sequence.several()
    engine.advance([call])
    assert call.finished
    call.finished.answer_by_s = time.monotonic()
    engine.advance([call])
    assert call.answered and len(sequence.steps) == 2


def test_finished_steps_are_delivered_though_the_deadline_passes(engine: TargetEngine) -> None:
    sequence = Sequence(engine, 1)
    call = sequence.several()
    call.deadline_s = deadline_s = time.monotonic() + 1.0
    assert call.is_late(deadline_s)
    engine.advance([call])
    assert call.finished and call.finished.answer_by_s == deadline_s and not call.is_late(deadline_s)


def test_a_sequence_that_loses_its_blocks_is_answered_first_and_goes_on_with_the_same_text(
    engine: TargetEngine, uninterrupted: Callable[..., Sequence]
) -> None:
    sequence, others = Sequence(engine, 1), uninterrupted()
    call = sequence.several()
    for _ in range(3):
        engine.advance([call])
    call.opened.preempt()
    engine._on_preempt(call.opened)
    assert engine.advance([call]) == [] and len(sequence.steps) == 3
    sequence.context.commit([token for step in sequence.steps for token in step.tokens])
    engine.advance([sequence.call(len(sequence.context) - 1)])
    assert [sequence.answers[2].next_token] == others.steps[3].tokens


def with_penalty(engine: TargetEngine, number: int) -> Sequence:
    """Return a sequence whose steps Python decides."""
    return Sequence(engine, number, sampling=Sampling(repetition_penalty=1.5))


def test_a_step_that_python_decides_has_a_pass_of_its_own_beside_three_others(
    engine: TargetEngine, uninterrupted: Callable[..., Sequence]
) -> None:
    """And the others stay unanswered."""
    others, few = [Sequence(engine, number) for number in (1, 2, 3)], with_penalty(engine, 4)
    single, calls = few.single(), [other.several() for other in others]
    engine.advance(calls)
    num_passes = engine.progress.num_passes
    assert engine.advance([*calls, single]) == calls
    assert engine.progress.num_passes == num_passes + 2
    answer = few.answers[1]
    assert isinstance(answer, Acceptance) and answer.load and not answer.is_atypical
    assert (answer.num_in_pass, answer.load.num_steps, answer.load.num_in_separate_pass) == (4, 1, 3)
    finished = calls[0].finished
    assert finished and [step.acceptance.num_in_pass for step in finished.steps] == [3, 4]
    for call, other in zip(calls, others, strict=True):
        advance_until_answered(engine, call)
        assert other.told == uninterrupted().told


@pytest.mark.parametrize("num_calls", (1, 2))
def test_a_pass_that_fails_loses_no_finished_step(
    engine: TargetEngine, monkeypatch: pytest.MonkeyPatch, num_calls: int
) -> None:
    sequence, other = Sequence(engine, 1), Sequence(engine, 2)
    calls, passes = [each.several() for each in (sequence, other)], Passes[StepRequest](engine)
    engine.progress.num_waiting.value = 1
    passes.run(calls)
    monkeypatch.setattr(engine.paged, "decode", lambda *_: 1 / 0)
    assert passes.run(calls[:num_calls]) == []
    assert [len(each.answers) for each in (sequence, other)] == [2, 1 + (num_calls > 1)]
    assert len(sequence.steps) == 1


def test_one_sequence_ends_and_the_others_go_on_with_their_drafts(
    engine: TargetEngine, uninterrupted: Callable[..., Sequence]
) -> None:
    short, long, other = Sequence(engine, 1), Sequence(engine, 2), Sequence(engine, 3)
    calls = [short.several(suffix_drafts(), max_tokens=4), long.several(suffix_drafts()), other.several()]
    for _ in range(MAX_STEPS):
        calls = engine.advance(calls)
    assert not calls
    assert long.told == uninterrupted(suffix_drafts()).told and other.told == uninterrupted().told
    tokens = [[token for step in each.steps for token in step.tokens] for each in (short, long)]
    assert tokens[0] == tokens[1][:4]


def test_an_older_sequence_that_needs_blocks_takes_those_of_one_whose_steps_are_unanswered(
    engine: TargetEngine, uninterrupted: Callable[..., Sequence]
) -> None:
    older, younger = Sequence(engine, 1), Sequence(engine, 2)
    engine.advance([older.begin()])
    older.context.commit([older.answers[0].next_token])
    call = younger.several()
    engine.advance([call])
    pool = engine.sequences.pool
    pool.allocate(pool.num_available, None)
    older.context.commit([5] * 40)
    assert engine.advance([call, older.call(len(PROMPT))]) == []
    assert engine.sequences.num_preempted == 1
    assert younger.told == uninterrupted().told[:1] and isinstance(older.answers[1], Acceptance)


def test_a_large_draft_has_a_pass_of_its_own_beside_steps(engine: TargetEngine) -> None:
    sequence, other = Sequence(engine, 1), Sequence(engine, 2)
    large, call = other.large(), sequence.several()
    engine.advance([call])  # so that no time is owed
    num_passes = engine.progress.num_passes
    assert engine.advance([large, call]) == [call]
    assert engine.progress.num_passes == num_passes + 2
    assert other.answers[1].num_in_pass == 2 and other.answers[1].is_atypical
    assert call.finished and [step.acceptance.num_in_pass for step in call.finished.steps] == [1, 2]


def test_the_load_of_every_pass_counts_the_contexts_that_its_rows_attend_to(engine: TargetEngine) -> None:
    pair = Sequence(engine, 1), Sequence(engine, 2, Context([*PROMPT, 5, 6]))
    calls = [sequence.several(max_tokens=4) for sequence in pair]
    num_tokens = sum(len(sequence.context) for sequence in pair)
    for _ in range(4):
        calls = engine.advance(calls)
    assert not calls
    loads = [step.acceptance.load for step in pair[0].steps]
    assert [load and (load.num_kv_tokens, load.num_row_kv_tokens) for load in loads] == [
        (num_tokens + 2 * number, num_tokens + 2 * number) for number in range(4)
    ]
