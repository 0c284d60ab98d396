"""Plain steps that native code runs several at a time, against single steps."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.context import Context
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.proposal import Budget, Proposal, Proposer, Step
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, StepOptions
from orchestrator.server.loop import StepsOfRun
from orchestrator.server.text import FinishReason, StopRule
from runtime.engine import runs
from runtime.engine.calls import BurstRequest
from runtime.engine.run import MAX_AHEAD
from runtime.engine.thread import EngineThread
from runtime.models.native.decoding import Continuation
from tests.support.engines import LIMIT_S, ask, make_paged, start_target, submit
from tests.unit.runtime.engine.test_runs import (
    MAX_TOKENS,
    METHODS,
    PROMPT,
    SAMPLINGS,
    Caller,
    Served,
    both,
    generate_text,
    run_of,
    sequence_of,
)

PLAIN_SAMPLINGS = (
    Sampling(),
    Sampling(1.0, seed=5),
    Sampling(0.8, top_p=0.9, top_k=20, seed=6),
    SAMPLINGS[1],
    SAMPLINGS[2],
)


@pytest.fixture(scope="module")
def folder(native_folder: Path) -> Path:
    return native_folder


@pytest.fixture(scope="module")
def native(folder: Path) -> Iterator[Served]:
    made = Served(folder, dtype="float32", kernels="native")
    yield made
    made.runs.close()


@pytest.mark.parametrize("min_tokens", (0, 20))
@pytest.mark.parametrize("sampling", PLAIN_SAMPLINGS, ids=("greedy", "sampled", "truncated", "penalised", "rejection"))
def test_plain_steps_run_together_tell_what_single_steps_tell(
    native: Served, folder: Path, sampling: Sampling, min_tokens: int
) -> None:
    free, by_step = both(native, folder, METHODS[0], sampling, StopRule(MAX_TOKENS), StepOptions())
    assert free == by_step
    stop = StopRule(MAX_TOKENS, frozenset({free[0].ids[-3]}), (), min_tokens)
    in_run, by_step = both(native, folder, METHODS[0], sampling, stop, StepOptions())
    assert in_run == by_step and by_step[1]["finish"] is FinishReason.STOP


def test_many_plain_runs_at_once_tell_what_each_tells_alone_in_passes_that_are_counted(
    native: Served, folder: Path
) -> None:
    samplings = [Sampling(seed % 3 / 2, seed=seed) for seed in range(16)]

    def tell(seed: int) -> Any:
        sequence = sequence_of(folder, samplings[seed], StopRule(MAX_TOKENS), StepOptions())
        run = run_of(*METHODS[seed % 4 == 3], StopRule(MAX_TOKENS))
        try:
            return generate_text(sequence, StepsOfRun(sequence, Caller(native, 100 + seed, sequence, run)))
        finally:
            native.runs.release(100 + seed)

    alone, before = [], native.engine.num_calls
    for seed in range(16):
        alone.append(tell(seed))
    num_steps = sum(each["num_steps"] for _, each in alone)
    assert num_steps <= native.engine.num_calls - before < num_steps + 16 * MAX_AHEAD
    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(tell, range(16))) == alone


class Alone:
    """One sequence of a target's engine, whose first token is known."""

    def __init__(self, folder: Path) -> None:
        self.paged = make_paged(folder, "float32", kernels="native")
        self.engine: EngineThread[StepRequest] = start_target(self.paged)
        self.context = Context(PROMPT)
        bare = StepRequest(delta_of(self.context, 0, 1, ""), TokenTree.bare(), Sampling(), StepOptions(), 60_000)
        self.context.commit([ask(self.engine, bare).next_token])

    def request(self, max_steps: int, limit_s: float = LIMIT_S, **end: Any) -> BurstRequest:
        delta = delta_of(self.context, len(self.context) - 1, 1, "")
        return BurstRequest(
            delta,
            TokenTree.bare(),
            Sampling(),
            StepOptions(),
            60_000,
            max_steps=max_steps,
            continuation=Continuation(max_steps, **end),
            limit_s=limit_s,
        )

    def steps(self, max_steps: int, limit_s: float = LIMIT_S, **end: Any) -> list[Acceptance]:
        """Return the plain steps after the context, which stays as it is."""
        answers = ask(self.engine, self.request(max_steps, limit_s, **end))
        return [step.acceptance for step in answers] if isinstance(answers, list) else [answers]


@pytest.fixture
def sequence(folder: Path) -> Iterator[Alone]:
    made = Alone(folder)
    yield made
    made.engine.close()


def test_plain_steps_end_where_the_pool_has_no_more_blocks(sequence: Alone) -> None:
    pool = sequence.paged.sequences.pool
    pool.allocate(pool.num_free + pool.num_cached - 1, None)
    assert len(sequence.steps(3)) == 3
    assert 3 < len(sequence.steps(32)) < 32


@pytest.mark.parametrize("min_tokens", (0, 4))
def test_plain_steps_end_with_a_stop_id_that_counts(sequence: Alone, min_tokens: int) -> None:
    tokens = [step.next_token for step in sequence.steps(12)]
    assert len(tokens) == 12
    found = sequence.steps(12, stop_ids=(tokens[6],), min_tokens=min_tokens)
    assert [step.next_token for step in found] == tokens[: tokens.index(tokens[6], min_tokens) + 1]


def test_no_plain_step_begins_after_the_limit(sequence: Alone) -> None:
    assert len(sequence.steps(32, 0.0)) == 1


def test_another_call_is_answered_before_plain_steps_are(sequence: Alone) -> None:
    """The second sequence calls while the first one's steps run; they all go on after its pass."""
    other = StepRequest(delta_of(Context(PROMPT), 0, 2, ""), TokenTree.bare(), Sampling(), StepOptions(), 60_000)
    for _ in range(500):  # until the call comes in time
        long = submit(sequence.engine, sequence.request(MAX_AHEAD))
        while sequence.engine._passes.progress.num_waiting.value:  # until the engine has taken it
            time.sleep(0)
        ask(sequence.engine, other)
        is_first = long.empty()
        assert len(long.get(timeout=LIMIT_S)) == MAX_AHEAD
        if is_first:
            return
    raise AssertionError("no call was answered before the steps")


class Resting(Proposer):
    """Drafts nothing and knows it for two steps at a time, of which a burst may run more."""

    name = "resting"
    num_plain, max_plain = 2, sys.maxsize

    def __init__(self) -> None:
        self.observed: list[int] = []

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        return Proposal.empty()

    def observe(self, tree: TokenTree, acceptance: Acceptance) -> None:
        self.observed.append(1)

    def observe_plain(self, steps: Sequence[Step]) -> None:
        self.observed.append(len(steps))


def test_a_burst_outlasts_a_rest_that_may_last_longer(
    native: Served, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "HOLD_S", 2.0)
    monkeypatch.setattr(runs, "MAX_HOLD_S", 2.0)
    resting, stop = Resting(), StopRule(MAX_TOKENS)
    with monkeypatch.context() as patch:
        patch.setattr(native, "wrap", lambda proposer: resting)
        text, _ = native.generate_text(folder, 300, Sampling(), run_of(*METHODS[0], stop), stop)
    plain, _ = native.generate_text(folder, 301, Sampling(), run_of(*METHODS[0], stop), stop)
    assert text.ids == plain.ids
    assert sum(resting.observed) == MAX_TOKENS and max(resting.observed) > 2
