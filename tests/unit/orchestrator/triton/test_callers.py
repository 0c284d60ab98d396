"""Calls come back with their result or their error; those that never return are left behind."""

from __future__ import annotations

import threading

import pytest

from orchestrator.core.errors import EngineLost
from orchestrator.triton.callers import Callers

LIMIT_S = 20.0


def test_a_call_s_result_and_its_error_come_back() -> None:
    callers: Callers[int] = Callers()

    def fails() -> int:
        raise RuntimeError("boom")

    for _ in range(3):
        assert callers.run(lambda: 7, is_lost=lambda: False) == 7
        with pytest.raises(RuntimeError, match="boom"):
            callers.run(fails, is_lost=lambda: False)


def test_calls_run_beside_each_other_and_threads_are_used_again() -> None:
    callers: Callers[bool] = Callers()
    together = threading.Barrier(3)
    seen: set[int] = set()

    def meet() -> bool:
        seen.add(threading.get_ident())
        together.wait(LIMIT_S)
        return True

    for _ in range(4):
        threads = [threading.Thread(target=callers.run, args=(meet, lambda: False)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()
    assert len(seen) == 3


def test_a_slow_call_is_waited_for_and_a_lost_one_left_behind() -> None:
    callers: Callers[int] = Callers()
    polls: list[int] = []
    gate = threading.Event()

    def slow() -> int:
        assert gate.wait(LIMIT_S)
        return 1

    def not_lost() -> bool:
        polls.append(1)
        if len(polls) == 3:
            gate.set()
        return False

    assert callers.run(slow, not_lost, poll_s=0.01) == 1
    gate.clear()
    with pytest.raises(EngineLost):
        callers.run(slow, lambda: True, poll_s=0.01)
    # The thread that was left behind answers nobody else, even when its call returns after all.
    gate.set()
    assert [callers.run(lambda n=n: n, lambda: False) for n in range(5)] == list(range(5))
