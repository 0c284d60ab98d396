"""Gathering on a simulated clock: sequences in a closed loop, each calling again a moment after its answer."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from runtime.engine.batching import IDLE_POLL_S, BatchingPolicy

PASS_S = 0.004
AWAY_S = 0.0005


@dataclass
class Loop:
    """An engine thread's loop without threads. arrivals: when whose call comes.

    away_s: how long a sequence stays away after an answer; None = it does not come back.
    holds_s: per pass, how long it was held back. batches: per pass, its size.
    """

    arrivals: list[tuple[float, int]]
    away_s: Callable[[int], float | None] = lambda _: AWAY_S
    pass_s: Callable[[], float] = lambda: PASS_S
    batching: BatchingPolicy = field(default_factory=BatchingPolicy)
    now_s: float = 0.0
    holds_s: list[float] = field(default_factory=list)
    limits_s: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)

    def run(self, num_passes: int) -> Loop:
        heapq.heapify(self.arrivals)
        for _ in range(num_passes):
            if self.arrivals:
                self.one_pass()
        return self

    def one_pass(self) -> None:
        oldest_call_s = self.arrivals[0][0]
        self.now_s = max(self.now_s, oldest_call_s)
        ready_s, calls = self.now_s, self.arrived()
        while wait_s := self.batching.wait_s(self.now_s, oldest_call_s):
            coming_s = self.arrivals[0][0] if self.arrivals else np.inf
            self.now_s = min(self.now_s + wait_s, coming_s)
            calls += self.arrived()
        self.holds_s.append(self.now_s - ready_s)
        self.limits_s.append(self.batching.patience * self.batching.pass_s)
        self.batches.append(len(calls))
        self.answer(calls)

    def arrived(self) -> list[int]:
        calls = []
        while self.arrivals and self.arrivals[0][0] <= self.now_s:
            when_s, sequence_id = heapq.heappop(self.arrivals)
            self.batching.arrived(sequence_id, when_s)
            calls.append(sequence_id)
        return calls

    def answer(self, calls: list[int]) -> None:
        pass_s = self.pass_s()
        self.now_s += pass_s
        for sequence_id in calls:
            away_s = self.away_s(sequence_id)
            if away_s is not None:
                heapq.heappush(self.arrivals, (self.now_s + away_s, sequence_id))
        self.batching.answered(calls, self.now_s, pass_s)


def two_groups() -> list[tuple[float, int]]:
    """Eight begin at once, eight others while the first pass is running."""
    return [(0.0, i) for i in range(8)] + [(PASS_S / 2, i) for i in range(8, 16)]


def test_a_lone_sequence_never_waits() -> None:
    loop = Loop([(0.0, 1)]).run(50)
    assert loop.batches == [1] * 50
    assert loop.holds_s == [0.0] * 50


def test_two_groups_of_8_merge_into_one() -> None:
    loop = Loop(two_groups()).run(60)
    assert loop.batches[:2] == [8, 8]
    assert loop.batches[-40:] == [16] * 40


def test_without_patience_the_two_groups_alternate_for_ever() -> None:
    """What gathering is there for: the same load, never held back."""
    loop = Loop(two_groups(), batching=BatchingPolicy(patience=0.0)).run(60)
    assert loop.batches == [8] * 60


@pytest.mark.parametrize("seed", range(3))
def test_groups_merge_although_times_vary(seed: int) -> None:
    rng = np.random.default_rng(seed)
    loop = Loop(
        two_groups(),
        away_s=lambda _: AWAY_S * rng.uniform(0.5, 1.5),
        pass_s=lambda: PASS_S * rng.uniform(0.8, 1.2),
    ).run(120)
    assert np.mean(loop.batches[40:]) > 15.0


def test_a_sequence_that_is_gone_delays_others_at_most_once() -> None:
    """Number 0 takes its twentieth answer and says nothing more, not even goodbye."""
    calls = iter(range(1000))
    loop = Loop(
        [(0.0, i) for i in range(4)],
        away_s=lambda i: None if i == 0 and next(calls) >= 20 else AWAY_S,
    ).run(60)
    gone = loop.batches.index(3)
    delayed = [hold for hold in loop.holds_s[gone:] if hold > 1e-9]
    assert loop.batches[gone:] == [3] * len(loop.batches[gone:])
    assert len(delayed) == 1
    assert delayed[0] <= 0.5 * PASS_S


def test_a_sequence_that_has_left_is_not_waited_for() -> None:
    batching = BatchingPolicy(pass_s=PASS_S)
    for sequence_id in (1, 2):
        batching.arrived(sequence_id, 1.0)
    batching.answered([1, 2], 2.0, PASS_S)
    batching.arrived(1, 2.0)
    assert batching.wait_s(2.0, oldest_call_s=2.0) > 0.0
    batching.left(2)
    assert batching.wait_s(2.0, oldest_call_s=2.0) == 0.0


def test_slow_readers_do_not_delay_others() -> None:
    """Who stays away for ten passes is not waited for, once that is known; the slow may wait for the quick."""
    loop = Loop([(0.0, i) for i in range(4)], away_s=lambda i: AWAY_S if i < 2 else 10 * PASS_S)
    assert max(loop.run(200).holds_s[60:]) <= AWAY_S + 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_no_wait_outlasts_patience_times_the_cost_of_a_pass(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_sequences, longest = int(rng.integers(2, 20)), float(rng.uniform(0.1, 3.0))
    loop = Loop(
        [(float(rng.uniform(0.0, 0.01)), i) for i in range(num_sequences)],
        away_s=lambda _: None if rng.random() < 0.002 else PASS_S * rng.uniform(0.0, longest),
        pass_s=lambda: PASS_S * rng.uniform(0.2, 5.0),
    ).run(300)
    holds, limits = np.array(loop.holds_s), np.array(loop.limits_s)
    assert (holds <= limits + 1e-9).all()
    assert holds.max() > 0.0


def test_without_a_call_it_waits_for_one() -> None:
    batching = BatchingPolicy(pass_s=PASS_S)
    assert batching.wait_s(5.0, oldest_call_s=None) == IDLE_POLL_S
    batching.arrived(1, 5.0)
    batching.answered([1], 5.1, PASS_S)
    assert batching.wait_s(5.1, oldest_call_s=None) == IDLE_POLL_S


def test_a_call_that_expired_does_not_shorten_the_wait_of_the_next_call() -> None:
    """Sequence 1 calls, but its deadline passes; sequence 2 calls later, and sequence 3 is due in good time for it."""
    batching = BatchingPolicy(patience=1.0, pass_s=PASS_S, return_s=0.003)
    for sequence_id in (1, 2, 3):
        batching.arrived(sequence_id, 1.0)
    batching.answered([1, 2, 3], 2.0, PASS_S)
    batching.arrived(1, 2.0005)
    assert batching.wait_s(2.0005, oldest_call_s=2.0005) == 0.0
    batching.left(1)
    batching.arrived(2, 2.003)
    assert batching.wait_s(2.003, oldest_call_s=2.003) == pytest.approx(0.003)


@pytest.mark.parametrize("answered_s", [0.0, 100.0])
def test_the_silent_are_forgotten_and_those_with_a_call_here_are_not(answered_s: float) -> None:
    batching = BatchingPolicy()
    for sequence_id in (1, 2, 3):
        batching.arrived(sequence_id, answered_s)
    batching.answered([1, 2], answered_s, PASS_S)
    batching.arrived(2, answered_s + 1.0)
    batching.forget_idle(answered_s + 1.9)
    assert set(batching._live) == {1, 2, 3}
    batching.forget_idle(answered_s + 2.1)
    assert set(batching._live) == {2, 3}
