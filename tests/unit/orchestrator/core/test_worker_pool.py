"""Workers: every call is answered once, whatever hangs, and nothing that hangs holds the process."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait

import pytest

from orchestrator.core.errors import Unavailable
from orchestrator.core.worker_pool import Busy, Late, Limited, Workers
from tests.support.hanging import WAIT_S, Hang, until

SHORT_S = 0.5  # enough for a thread to begin, on a machine that is busy


@pytest.fixture
def hang() -> Iterator[Hang]:
    made = Hang()
    yield made
    made.let_go.set()


def answers_of(futures: list[Future[str]]) -> list[list[str]]:
    """Return lists that grow with every answer that a future's caller gets."""
    answers: list[list[str]] = [[] for _ in futures]
    for future, own in zip(futures, answers, strict=True):
        future.add_done_callback(lambda done, own=own: own.append(str(done.exception() or done.result())))
    return answers


def test_calls_are_made_by_no_more_threads_than_allowed_and_all_are_answered() -> None:
    workers: Workers[str] = Workers("w", 3)
    here: set[str] = set()
    meeting = threading.Barrier(3)

    def work(number: int) -> str:
        meeting.wait(WAIT_S)  # so three do run at once
        here.add(threading.current_thread().name + str(threading.get_ident()))
        if number % 3 == 0:
            raise ValueError(str(number))
        return str(number)

    futures = [workers.start(lambda number=number: work(number)) for number in range(30)]
    assert not wait(futures, WAIT_S).not_done
    assert [str(future.exception() or future.result()) for future in futures] == [str(n) for n in range(30)]
    assert len(here) == 3
    workers.close("done")


def test_close_answers_every_call_once_those_that_never_began_those_that_hang_and_those_that_come_later(
    hang: Hang,
) -> None:
    workers: Workers[str] = Workers("stopping", 1)
    made: list[str] = []
    futures = [workers.start(hang), workers.start(lambda: made.append("it ran") or "waiting")]
    answers = answers_of(futures)
    assert hang.begun.wait(WAIT_S)
    workers.close("the server stops", 0.01)
    answers += answers_of([workers.start(lambda: "too late")])
    assert answers == [["the server stops"]] * 3
    assert all(isinstance(future.exception(), Unavailable) for future in futures)
    hang.let_go.set()
    assert hang.ended.wait(WAIT_S)
    until(lambda: not any(thread.name == "stopping" for thread in threading.enumerate()))  # no second answer can come
    assert answers == [["the server stops"]] * 3 and not made


def test_close_waits_for_what_ends_in_time(hang: Hang) -> None:
    workers: Workers[str] = Workers("w", 1)
    (own,) = answers_of([workers.start(hang)])
    assert hang.begun.wait(WAIT_S)
    threading.Timer(0.05, hang.let_go.set).start()
    workers.close("the server stops", WAIT_S)
    assert own == ["late"]


def test_a_call_that_was_taken_back_is_never_made(hang: Hang) -> None:
    workers: Workers[str] = Workers("w", 1)
    made: list[str] = []
    first, second = workers.start(hang), workers.start(lambda: made.append("it ran") or "")
    assert hang.begun.wait(WAIT_S)
    assert workers.drop(second) and not workers.drop(first)
    hang.let_go.set()
    assert workers.start(lambda: "next").result(WAIT_S) == "next" and first.result(WAIT_S) == "late"
    assert not made and not second.done()


def test_a_hung_call_does_not_keep_the_process_from_exiting() -> None:
    code = (
        "import threading\n"
        "from orchestrator.core.worker_pool import Workers\n"
        "begun = threading.Event()\n"
        "Workers('w', 2).start(lambda: (begun.set(), threading.Event().wait()))\n"
        "print(begun.wait(15))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True\n", "")


# Calls that are waited for only so long


def test_limited_passes_on_what_the_call_says() -> None:
    limited: Limited[str] = Limited("l", 1, 1, WAIT_S)

    def fail() -> str:
        raise TimeoutError("of its own")

    assert limited.call(lambda: "said") == "said"
    with pytest.raises(TimeoutError, match="of its own"):
        limited.call(fail)
    assert limited.call(lambda: "said") == "said"


def test_limited_leaves_so_many_late_calls_behind_and_makes_no_other_until_one_ends(hang: Hang) -> None:
    limited: Limited[str] = Limited("l", 1, 2, SHORT_S)
    other = Hang()
    for late in (hang, other):
        with pytest.raises(Late):
            limited.call(late)
    with pytest.raises(Busy):
        limited.call(lambda: pytest.fail("it was made"))
    assert hang.begun.is_set() and other.begun.is_set()
    limited.limit_s = WAIT_S
    other.let_go.set()
    until(lambda: limited._num_late < 2)
    assert limited.call(lambda: "said") == "said"


def test_limited_call_that_finds_no_worker_is_not_made_later(hang: Hang) -> None:
    limited: Limited[str] = Limited("l", 1, 1, SHORT_S)
    hung = [limited._workers.start(hang) for _ in range(2)]
    made: list[str] = []
    with pytest.raises(Busy):
        limited.call(lambda: made.append("it ran") or "")
    hang.let_go.set()
    assert [future.result(WAIT_S) for future in hung] == ["late"] * 2
    limited.limit_s = WAIT_S
    assert limited.call(lambda: "said") == "said" and not made
