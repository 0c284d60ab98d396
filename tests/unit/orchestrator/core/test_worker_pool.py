"""The worker pool: every call is answered once, whatever hangs, and a hung call holds neither threads nor the process."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import wait

import pytest

from orchestrator.core.errors import Unavailable
from orchestrator.core.worker_pool import Busy, Call, CallState, Late, WorkerPool
from tests.support.hanging import WAIT_S, Hang, until

SHORT_S = 0.5  # enough for a thread to begin, on a machine that is busy


@pytest.fixture
def hang() -> Iterator[Hang]:
    made = Hang()
    yield made
    made.let_go.set()


def answers_of(calls: list[Call[str]]) -> list[list[str]]:
    """Return lists that grow with every answer that a call's caller gets."""
    answers: list[list[str]] = [[] for _ in calls]
    for call, own in zip(calls, answers, strict=True):
        call.future.add_done_callback(lambda done, own=own: own.append(str(done.exception() or done.result())))
    return answers


def no_thread(thread: threading.Thread) -> None:
    """Stand for `Thread.start` where the system allows no further one."""
    raise RuntimeError("can't start new thread")


def num_threads(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def test_calls_are_made_by_no_more_threads_than_allowed_and_all_are_answered() -> None:
    pool: WorkerPool[str] = WorkerPool("w", 3)
    here: set[str] = set()
    meeting = threading.Barrier(3)

    def work(number: int) -> str:
        meeting.wait(WAIT_S)  # so three do run at once
        here.add(threading.current_thread().name + str(threading.get_ident()))
        if number % 3 == 0:
            raise ValueError(str(number))
        return str(number)

    calls = [pool.start(lambda number=number: work(number)) for number in range(30)]
    assert not wait([call.future for call in calls], WAIT_S).not_done
    assert [str(call.future.exception() or call.future.result()) for call in calls] == [str(n) for n in range(30)]
    assert len(here) == 3
    pool.close("done")


def test_a_call_that_gets_no_thread_is_refused_and_the_next_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    pool: WorkerPool[str] = WorkerPool("w", 2)
    with monkeypatch.context() as system:
        system.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(Unavailable, match="no further thread"):
            pool.start(lambda: "a").future.result(WAIT_S)
    assert [pool.start(lambda: "b").future.result(WAIT_S) for _ in range(3)] == ["b"] * 3
    pool.close("done")


def test_a_call_that_gets_no_thread_of_its_own_waits_for_another_s_and_later_calls_get_theirs(
    hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool: WorkerPool[str] = WorkerPool("w")
    first = pool.start(hang)
    assert hang.begun.wait(WAIT_S)
    with monkeypatch.context() as system:
        system.setattr(threading.Thread, "start", no_thread)
        second = pool.start(lambda: "second")
    assert not second.future.done()
    assert pool.start(lambda: "third").future.result(WAIT_S) == "third"
    assert second.future.result(WAIT_S) == "second"
    hang.let_go.set()
    assert first.future.result(WAIT_S) == "late"
    pool.close("done")


def test_a_pool_without_a_limit_runs_all_calls_beside_each_other_and_uses_its_threads_again() -> None:
    pool: WorkerPool[int] = WorkerPool("unlimited")
    meeting = threading.Barrier(5)
    for _ in range(4):
        calls = [pool.start(lambda: meeting.wait(WAIT_S)) for _ in range(5)]
        assert sorted(call.future.result(WAIT_S) for call in calls) == list(range(5))
        until(lambda calls=calls: all(call.state is CallState.DONE for call in calls))
    assert num_threads("unlimited") == 5
    pool.close("done")


def test_close_answers_every_call_once_those_that_never_began_those_that_hang_and_those_that_come_later(
    hang: Hang,
) -> None:
    pool: WorkerPool[str] = WorkerPool("stopping", 1)
    made: list[str] = []
    calls = [pool.start(hang), pool.start(lambda: made.append("it ran") or "waiting")]
    answers = answers_of(calls)
    assert hang.begun.wait(WAIT_S)
    pool.close("the server stops", 0.01)
    calls.append(pool.start(lambda: "too late"))
    answers += answers_of(calls[2:])
    assert answers == [["the server stops"]] * 3
    assert all(isinstance(call.future.exception(), Unavailable) for call in calls)
    hang.let_go.set()
    assert hang.ended.wait(WAIT_S)
    until(lambda: not num_threads("stopping"))  # no second answer can come
    assert answers == [["the server stops"]] * 3 and not made


def test_a_call_that_was_abandoned_while_it_waited_is_never_made(hang: Hang) -> None:
    pool: WorkerPool[str] = WorkerPool("w", 1)
    made: list[str] = []
    first, second = pool.start(hang), pool.start(lambda: made.append("it ran") or "")
    assert hang.begun.wait(WAIT_S)
    assert pool.abandon(second, Busy())
    assert second.state is CallState.DONE
    hang.let_go.set()
    assert pool.start(lambda: "next").future.result(WAIT_S) == "next" and first.future.result(WAIT_S) == "late"
    assert not made


def test_a_hung_call_does_not_keep_the_process_from_exiting() -> None:
    code = (
        "import threading\n"
        "from orchestrator.core.worker_pool import WorkerPool\n"
        "begun = threading.Event()\n"
        "WorkerPool('w', 2).start(lambda: (begun.set(), threading.Event().wait()))\n"
        "print(begun.wait(15))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True\n", "")


# Calls that are waited for only so long


def test_run_passes_on_the_result_and_the_error_of_the_call() -> None:
    pool: WorkerPool[str] = WorkerPool("l", 1, 1)

    def fail() -> str:
        raise TimeoutError("of its own")

    assert pool.run(lambda: "result", WAIT_S) == "result"
    with pytest.raises(TimeoutError, match="of its own"):
        pool.run(fail, WAIT_S)
    assert pool.run(lambda: "result", WAIT_S) == "result"


def test_run_leaves_so_many_late_calls_behind_and_makes_no_other_until_one_ends(hang: Hang) -> None:
    pool: WorkerPool[str] = WorkerPool("l", 1, 2)
    other = Hang()
    for late in (hang, other):
        with pytest.raises(Late):
            pool.run(late, SHORT_S)
    with pytest.raises(Busy):
        pool.run(lambda: pytest.fail("it was made"), SHORT_S)
    assert hang.begun.is_set() and other.begun.is_set()
    other.let_go.set()
    until(lambda: pool.num_abandoned < 2)
    assert pool.run(lambda: "result", WAIT_S) == "result"
