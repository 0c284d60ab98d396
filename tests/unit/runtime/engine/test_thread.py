"""The engine thread with a scripted engine: whatever happens, every call is answered exactly once."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from orchestrator.core.context import Context
from orchestrator.core.errors import EngineError, EngineLost, ServingError, Unavailable
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, StepOptions
from runtime.engine.calls import EngineCall, Progress
from runtime.engine.thread import EngineThread

LIMIT_S = 20.0


@dataclass
class ScriptedSequences:
    """Notes which sequences are dropped; `drop_idle` raises what it is told to."""

    dropped: list[int] = field(default_factory=list)
    drop_idle_error: Exception | None = None

    def drop(self, sequence_id: int) -> None:
        self.dropped.append(sequence_id)

    def drop_idle(self, now_s: float, busy: set[int]) -> None:
        if self.drop_idle_error:
            raise self.drop_idle_error


@dataclass
class ScriptedEngine:
    """Answers each call with its sequence id as the next token.

    passes: how many passes a sequence's call takes (1 where nothing is said). failing: whose calls break a pass, with
    `error`.
    gate: while it is shut, a pass stands still, so that a test can arrange what waits behind it.
    """

    passes: dict[int, int] = field(default_factory=dict)
    failing: set[int] = field(default_factory=set)
    error: type[Exception] = RuntimeError
    gate: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)
    seen: list[list[int]] = field(default_factory=list)
    sequences: ScriptedSequences = field(default_factory=ScriptedSequences)
    progress: Progress = field(default_factory=Progress)

    kernels = "torch"

    def __post_init__(self) -> None:
        self.gate.set()

    def advance(self, calls: list[EngineCall[StepRequest]]) -> list[EngineCall[StepRequest]]:
        self.seen.append([call.sequence_id for call in calls])
        self.entered.set()
        assert self.gate.wait(LIMIT_S)
        self.progress.count(len(calls))
        left = []
        for call in calls:
            if call.sequence_id in self.failing:
                raise self.error("boom")
            self.passes[call.sequence_id] = self.passes.get(call.sequence_id, 1) - 1
            if self.passes[call.sequence_id] > 0:
                left.append(call)
            else:
                del self.passes[call.sequence_id]
                call.reply(Acceptance((), call.sequence_id))
        return left


class Answers:
    """All that came back for one call."""

    def __init__(self) -> None:
        self.received: list[Any] = []
        self._first = threading.Event()

    def __call__(self, answer: Any) -> None:
        self.received.append(answer)
        self._first.set()

    def only(self) -> Any:
        """Wait for the answer; a second one would be an error."""
        assert self._first.wait(LIMIT_S), "a call was never answered"
        assert len(self.received) == 1
        return self.received[0]

    def error(self) -> str:
        """Return the text of the answer, which is an error."""
        assert isinstance(self.only(), ServingError)
        return f"{type(self.only()).__name__}: {self.only()}"

    def token(self) -> int:
        return self.only().next_token


def step(sequence_id: int) -> StepRequest:
    delta = delta_of(Context([1, 2, 3]), 0, sequence_id, "")
    return StepRequest(delta, TokenTree.bare(), Sampling(), StepOptions(), 1000)


class Bench:
    """A scripted engine in its thread; `hold` puts it into a pass that stands still."""

    def __init__(self) -> None:
        self.script = ScriptedEngine()
        self.thread: EngineThread[StepRequest] = EngineThread(self.script, "test-engine")

    def submit(self, sequence_id: int, within_s: float = LIMIT_S, answers: Answers | None = None) -> Answers:
        answers = answers or Answers()
        self.thread.submit(step(sequence_id), time.monotonic() + within_s, answers)
        return answers

    def hold(self) -> Answers:
        """Begin a pass over sequence 100 alone and keep it standing until `go`."""
        self.script.gate.clear()
        self.script.entered.clear()
        answers = self.submit(100)
        assert self.script.entered.wait(LIMIT_S)
        return answers

    def go(self) -> None:
        self.script.gate.set()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    bench.thread.start()
    yield bench
    bench.go()
    bench.thread.close()


def test_calls_that_wait_together_are_answered_by_one_pass(bench: Bench) -> None:
    held = bench.hold()
    answers = [bench.submit(i) for i in (1, 2, 3)]
    bench.go()
    assert [a.token() for a in (held, *answers)] == [100, 1, 2, 3]
    assert bench.script.seen == [[100], [1, 2, 3]]
    assert (bench.thread.num_passes, bench.thread.num_calls) == (2, 4)


def test_a_call_of_many_passes_is_answered_once_and_delays_no_other_call(bench: Bench) -> None:
    bench.script.passes = {1: 4}
    held = bench.hold()
    long, short = bench.submit(1), bench.submit(2)
    bench.go()
    assert (held.token(), long.token(), short.token()) == (100, 1, 2)
    assert bench.script.seen == [[100], [1, 2], [1], [1], [1]]


def test_a_deadline_that_passes_in_the_queue_is_reported_without_calling_the_engine(bench: Bench) -> None:
    bench.hold()
    late = bench.submit(1, within_s=0.01)
    time.sleep(0.02)
    bench.go()
    assert "Unavailable: the deadline passed" in late.error()
    assert bench.submit(2).token() == 2
    assert all(1 not in batch for batch in bench.script.seen)
    assert 1 in bench.script.sequences.dropped
    assert 1 not in bench.thread.batching._live


def test_a_release_answers_the_call_that_is_still_waiting(bench: Bench) -> None:
    bench.hold()
    waiting, other = bench.submit(1), bench.submit(2)
    bench.thread.release(1)
    bench.go()
    assert "Unavailable: the sequence was released" in waiting.error()
    assert other.token() == 2
    assert bench.script.sequences.dropped == [1]
    assert all(1 not in batch for batch in bench.script.seen)


def test_a_second_call_of_one_sequence_is_refused_and_the_first_is_not(bench: Bench) -> None:
    bench.hold()
    first, second = bench.submit(1), bench.submit(1)
    bench.go()
    assert first.token() == 1
    assert "Unavailable: sequence 1 has a call under way" in second.error()
    assert bench.submit(1).token() == 1


def test_close_answers_what_is_queued(bench: Bench) -> None:
    held = bench.hold()
    queued = [bench.submit(1), bench.submit(2)]
    bench.go()
    closer = threading.Thread(target=bench.thread.close)
    closer.start()
    closer.join(LIMIT_S)
    assert not closer.is_alive()
    assert held.token() == 100
    for answers in queued:
        assert isinstance(answers.only(), Acceptance) or "shutting down" in answers.error()


def test_a_pass_that_breaks_refuses_the_culprit_alone(bench: Bench) -> None:
    bench.script.failing = {2}
    held = bench.hold()
    answers = {i: bench.submit(i) for i in (1, 2, 3)}
    bench.go()
    assert held.token() == 100
    assert [answers[1].token(), answers[3].token()] == [1, 3]
    assert "EngineError: the engine failed on this request; the server's log has the cause" in answers[2].error()
    assert 2 in bench.script.sequences.dropped and 3 not in bench.script.sequences.dropped
    assert bench.submit(4).token() == 4


def test_an_engine_that_breaks_outside_a_pass_answers_every_call_and_then_says_so(bench: Bench) -> None:
    """The host ends the process when it is told: whoever were not answered by then would never be."""
    answered_at_end: list[int] = []
    ended = threading.Event()
    held = bench.hold()
    waiting = [bench.submit(1), bench.submit(2)]

    def end() -> None:
        answered_at_end.extend(len(answers.received) for answers in (held, *waiting))
        ended.set()

    bench.thread.on_broken(end)
    bench.script.sequences.drop_idle_error = RuntimeError("boom")
    bench.go()
    assert ended.wait(LIMIT_S)
    assert answered_at_end == [1, 1, 1] and held.token() == 100
    for answers in (*waiting, bench.submit(3)):
        assert isinstance(answers.only(), EngineLost)


def test_an_engine_whose_gpu_has_failed_is_broken_for_all_calls(bench: Bench) -> None:
    """After an error of a kernel, CUDA refuses the process everything else, too."""
    broken = threading.Event()
    bench.thread.on_broken(broken.set)
    bench.script.error = torch.AcceleratorError
    bench.script.failing.add(1)
    for answers in (bench.submit(1), bench.submit(2)):
        assert isinstance(answers.only(), EngineLost)
    assert broken.wait(LIMIT_S)


def test_a_thread_that_cannot_be_prepared_says_so_to_every_call() -> None:
    def broken() -> None:
        raise RuntimeError("boom")

    bench = Bench()
    bench.thread = EngineThread(bench.script, "broken", broken)
    early = bench.submit(1)
    bench.thread.start()
    assert "EngineLost" in early.error()
    bench.thread.close()
    assert "EngineLost" in bench.submit(2).error()


@pytest.mark.parametrize("seed", range(2))
def test_every_call_of_a_storm_is_answered_exactly_once(bench: Bench, seed: int) -> None:
    """Five threads: good calls, late ones, doubles, releases of what is under way, calls that break; then close."""
    bench.script.failing = {7, 17, 27, 37, 47}
    submitted: list[Answers] = []

    def send(thread: int) -> None:
        rng = np.random.default_rng((seed, thread))
        for _ in range(60):
            sequence_id = 10 * thread + int(rng.integers(0, 9))
            move = rng.random()
            if move < 0.5:
                bench.submit(sequence_id, answers=register())
            elif move < 0.7:
                bench.submit(sequence_id, float(rng.uniform(-0.001, 0.002)), register())
            elif move < 0.8:
                bench.thread.release(sequence_id)
            else:
                time.sleep(0.001)

    def register() -> Answers:
        answers = Answers()
        submitted.append(answers)
        return answers

    senders = [threading.Thread(target=send, args=(i,)) for i in range(5)]
    for sender in senders:
        sender.start()
    time.sleep(0.02)
    for sender in senders[:4]:
        sender.join()
    bench.thread.close()
    senders[4].join()
    kinds = Counter(type(answers.only()) for answers in submitted)
    assert len(submitted) > 100
    assert kinds[Acceptance] > 20 and kinds[Unavailable] > 5 and kinds[EngineError] > 0
