"""The breaker: whatever hangs or fails behind it is waited for only so long, and then left alone for a while."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from orchestrator.core.types import DraftCounts
from orchestrator.core.worker_pool import CallState
from orchestrator.drafting.drafter_clients import Backoff
from orchestrator.server import breaker as module
from orchestrator.server.breaker import Breaker
from tests.support.hanging import WAIT_S, Hang, until


@pytest.fixture
def hang() -> Iterator[Hang]:
    made = Hang()
    yield made
    made.let_go.set()


def ask(breaker: Breaker[str], function: Callable[[], str]) -> str | None:
    call = breaker.start(function)
    return None if call is None else breaker.wait(call)


def fail() -> str:
    raise ValueError("a drafter's own trouble")


def test_breaker_answer_comes_through() -> None:
    breaker: Breaker[str] = Breaker("b", 2, WAIT_S)
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
    assert ask(Breaker("c", 1, WAIT_S), lambda: "tree") == "tree"
    breaker.timeout_s = WAIT_S
    assert ask(breaker, lambda: "tree") == "tree"


def test_breaker_call_that_returns_just_after_its_time_is_not_counted_for_ever(hang: Hang) -> None:
    breaker: Breaker[str] = Breaker("b", 1, 0.0)
    for _ in range(20):
        ask(breaker, lambda: "slow")
    until(lambda: not breaker.is_open)
    assert breaker.counts.num_late + breaker.counts.num_skipped <= 20


def test_breaker_failure_is_no_answer_and_cools_down() -> None:
    breaker: Breaker[str] = Breaker("b", 1, WAIT_S, cool_down_s=0.2)
    assert ask(breaker, fail) is None
    assert breaker.is_open
    assert breaker.start(lambda: "too soon") is None
    until(lambda: not breaker.is_open)
    assert ask(breaker, lambda: "tree") == "tree"
    assert breaker.counts == DraftCounts(num_calls=2, num_failed=1, num_skipped=1)


def test_breaker_call_that_raises_a_timeout_of_its_own_has_failed() -> None:
    def own_timeout() -> str:
        raise TimeoutError("of the drafter's own")

    breaker: Breaker[str] = Breaker("b", 1, WAIT_S)
    assert ask(breaker, own_timeout) is None
    assert (breaker.counts.num_failed, breaker.counts.num_late) == (1, 0)
    assert breaker.is_open


def test_breaker_hung_calls_leave_workers_for_the_others(hang: Hang) -> None:
    """max_running requests draft at once while other calls hang."""
    breaker: Breaker[str] = Breaker("b", 2, 0.05, max_late=3)
    assert [ask(breaker, hang) for _ in range(2)] == [None, None]
    breaker.timeout_s = WAIT_S
    meeting = threading.Barrier(2)

    def meet() -> str:
        meeting.wait(WAIT_S)
        return "met"

    both = [breaker.start(meet) for _ in range(2)]
    assert [breaker.wait(future) for future in both if future] == ["met", "met"]


def test_breaker_never_more_calls_at_once_than_workers(hang: Hang) -> None:
    breaker: Breaker[str] = Breaker("b", 3, WAIT_S, max_late=1)
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
        thread.join(WAIT_S)
    assert answers == [None] * 30
    assert breaker.is_open
    counts = breaker.counts
    assert counts.num_calls == counts.num_late and counts.num_calls + counts.num_skipped == 30


@pytest.mark.parametrize("kind", ["died", "hung"])
def test_breaker_recovers_from_calls_that_never_return(hang: Hang, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Two calls that hung used to keep it open for ever."""
    has_died = threading.Event()
    monkeypatch.setattr(module, "HUNG_S", 0.5 if kind == "hung" else 1e9)
    breaker: Breaker[str] = Breaker("b", 1, 0.05, max_late=2, cool_down_s=0.05)
    for _ in range(2):
        call = breaker.start(hang, has_died.is_set)
        assert call and breaker.wait(call) is None
    assert breaker.is_open
    if kind == "died":
        has_died.set()
    until(lambda: not breaker.is_open)
    breaker.timeout_s = WAIT_S
    assert ask(breaker, lambda: "tree") == "tree"
    assert call.state is (CallState.DONE if kind == "died" else CallState.ABANDONED)


def test_breaker_leaves_only_so_many_hung_calls_behind(hang: Hang, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HUNG_S", 0.0)
    monkeypatch.setattr(module, "MAX_ABANDONED", 5)
    breaker: Breaker[str] = Breaker("b", 1, 0.02)
    for _ in range(20):
        ask(breaker, hang)
    assert breaker.is_open and breaker.counts == DraftCounts(num_calls=5, num_late=5, num_skipped=15)
    hang.let_go.set()
    until(lambda: not breaker.is_open)


def test_breaker_counts_an_abandoned_call_as_late(hang: Hang) -> None:
    breaker: Breaker[str] = Breaker("b", 2, 0.02, max_late=2)
    assert breaker.start(hang) and breaker.start(hang)
    until(lambda: breaker.is_open)
    assert breaker.counts.num_late == 2


def test_breaker_closed_makes_no_call(hang: Hang) -> None:
    breaker: Breaker[str] = Breaker("b", 1, 0.02)
    assert ask(breaker, hang) is None
    breaker.close()
    assert ask(breaker, lambda: "too late") is None
    breaker.close()


def test_breaker_hung_call_does_not_keep_the_process_from_exiting() -> None:
    code = (
        "import threading\n"
        "from orchestrator.server.breaker import Breaker\n"
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
        backoff.note(has_succeeded=False)
        now[0] += pause_s - 0.01
        assert backoff.is_on
        now[0] += 0.02
        assert not backoff.is_on
    backoff.note(has_succeeded=True)
    assert not backoff.is_on
    backoff.note(has_succeeded=False)
    now[0] += 1.01
    assert not backoff.is_on
