"""The breaker: whatever hangs or fails behind it is waited for only so long, and then left alone for a while."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from orchestrator.triton import breaker as module
from orchestrator.triton.breaker import Backoff, Breaker, DraftCounts

LIMIT_S = 20.0


def until(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s, "waited too long"
        time.sleep(0.002)


class Hang:
    """A call that does not return until it is let go."""

    def __init__(self) -> None:
        self.begun, self.let_go = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.let_go.wait(LIMIT_S)
        return "late"


@pytest.fixture
def hang() -> Iterator[Hang]:
    made = Hang()
    yield made
    made.let_go.set()


def ask(breaker: Breaker[str], function: Callable[[], str]) -> str | None:
    future = breaker.start(function)
    return None if future is None else breaker.wait(future)


def fail() -> str:
    raise ValueError("a drafter's own trouble")


def test_breaker_answer_comes_through() -> None:
    breaker: Breaker[str] = Breaker("b", 2, LIMIT_S)
    assert [ask(breaker, lambda: "tree") for _ in range(50)] == ["tree"] * 50
    assert breaker.counts == DraftCounts(num_calls=50)
    breaker.close()


def test_breaker_late_calls_open_it_and_their_return_closes_it(hang: Hang) -> None:
    breaker: Breaker[str] = Breaker("b", 1, 0.02, max_late=2)
    assert ask(breaker, hang) is None
    assert not breaker.is_open, "one late call is bad luck"
    assert ask(breaker, hang) is None
    assert breaker.is_open
    assert breaker.start(lambda: "never called") is None
    assert breaker.counts == DraftCounts(num_calls=2, num_late=2, num_skipped=1)
    hang.let_go.set()
    until(lambda: not breaker.is_open)
    assert ask(Breaker("c", 1, LIMIT_S), lambda: "tree") == "tree"
    breaker.timeout_s = LIMIT_S
    assert ask(breaker, lambda: "tree") == "tree"


def test_breaker_call_that_returns_just_after_its_time_is_not_counted_for_ever(hang: Hang) -> None:
    breaker: Breaker[str] = Breaker("b", 1, 0.0)
    for _ in range(20):
        ask(breaker, lambda: "slow")
    until(lambda: not breaker.is_open)
    assert breaker.counts.num_late + breaker.counts.num_skipped <= 20


def test_breaker_failure_is_no_answer_and_cools_down() -> None:
    breaker: Breaker[str] = Breaker("b", 1, LIMIT_S, cool_down_s=0.2)
    assert ask(breaker, fail) is None
    assert breaker.is_open
    assert breaker.start(lambda: "too soon") is None
    until(lambda: not breaker.is_open)
    assert ask(breaker, lambda: "tree") == "tree"
    assert breaker.counts == DraftCounts(num_calls=2, num_failed=1, num_skipped=1)


def test_breaker_call_that_raises_a_timeout_of_its_own_has_failed() -> None:
    def own_timeout() -> str:
        raise TimeoutError("of the drafter's own")

    breaker: Breaker[str] = Breaker("b", 1, LIMIT_S)
    assert ask(breaker, own_timeout) is None
    assert (breaker.counts.num_failed, breaker.counts.num_late) == (1, 0)
    assert breaker.is_open


def test_breaker_hung_calls_leave_workers_for_the_others(hang: Hang) -> None:
    """max_workers requests draft at once even while as many calls hang as it takes to open the breaker."""
    breaker: Breaker[str] = Breaker("b", 2, LIMIT_S, max_late=2)
    hung = [breaker.start(hang) for _ in range(2)]
    assert all(hung)
    meeting = threading.Barrier(2)

    def meet() -> str:
        meeting.wait(LIMIT_S)
        return "met"

    both = [breaker.start(meet) for _ in range(2)]
    assert [breaker.wait(future) for future in both if future] == ["met", "met"]


def test_breaker_never_more_calls_at_once_than_workers(hang: Hang) -> None:
    breaker: Breaker[str] = Breaker("b", 3, LIMIT_S, max_late=1)
    lock, num_now, most = threading.Lock(), [0], [0]

    def count() -> str:
        with lock:
            num_now[0] += 1
            most[0] = max(most[0], num_now[0])
        time.sleep(0.005)
        with lock:
            num_now[0] -= 1
        return "done"

    futures = [breaker.start(count) for _ in range(40)]
    assert [breaker.wait(future) for future in futures if future] == ["done"] * 40
    assert most[0] <= 4


def test_breaker_wait_is_over_in_time_from_many_threads(hang: Hang) -> None:
    """Nobody waits longer than the time-out, however many ask; the limit here only guards against a hang."""
    breaker: Breaker[str] = Breaker("b", 8, 0.05, max_late=2)
    answers: list[str | None] = []
    threads = [threading.Thread(target=lambda: answers.append(ask(breaker, hang)), daemon=True) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert answers == [None] * 30
    assert breaker.is_open
    counts = breaker.counts
    assert counts.num_calls == counts.num_late and counts.num_calls + counts.num_skipped == 30


def test_breaker_closed_makes_no_call(hang: Hang) -> None:
    breaker: Breaker[str] = Breaker("b", 1, 0.02)
    assert ask(breaker, hang) is None
    breaker.close()
    assert ask(breaker, lambda: "too late") is None
    breaker.close()


def test_breaker_hung_call_does_not_keep_the_process_from_exiting() -> None:
    code = (
        "import threading\n"
        "from orchestrator.triton.breaker import Breaker\n"
        "breaker = Breaker('b', 1, 0.05)\n"
        "print(breaker.wait(breaker.start(threading.Event().wait)), breaker.wait(breaker.start(lambda: 'tree')))\n"
        "breaker.close()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=15, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "None tree\n", "")


def test_backoff_doubles_its_pauses_up_to_the_longest_and_a_success_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    backoff = Backoff(1.0, 5.0)
    assert not backoff.is_on
    for pause_s in (1.0, 2.0, 4.0, 5.0, 5.0):
        backoff.note(succeeded=False)
        now[0] += pause_s - 0.01
        assert backoff.is_on
        now[0] += 0.02
        assert not backoff.is_on
    backoff.note(succeeded=True)
    assert not backoff.is_on
    backoff.note(succeeded=False)
    now[0] += 1.01
    assert not backoff.is_on
