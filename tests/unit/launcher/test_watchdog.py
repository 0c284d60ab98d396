"""The watchdog over a server's processes, without a server."""

from __future__ import annotations

import itertools

import pytest

from launcher import watchdog as module
from launcher.admin import AdminError
from launcher.triton_process import StartError
from launcher.watchdog import reload_limit_s
from orchestrator.core.errors import ServingError
from tests.support.hanging import until
from tests.unit.launcher.conftest import Watched

KILLED = "the server ended by signal 6: lock_exception"


def test_an_exception_is_counted_and_the_watchdog_goes_on(watched: Watched) -> None:
    watched.admin.error = ValueError("a bug")
    watched.dog.start()
    until(lambda: watched.dog.num_errors >= 2)
    assert "failed 1 times, continuing: ValueError('a bug')" in "\n".join(watched.lines)
    assert watched.dog.is_alive() and watched.dog.failure is None
    watched.admin.error = None
    until(lambda: any("reloaded in" in line for line in watched.lines))


def test_a_model_that_cannot_be_reloaded_costs_a_triton(watched: Watched) -> None:
    """A process that dies with a lock in shared memory may leave Triton stuck (triton#8882)."""
    watched.admin.error = AdminError("models/target/load: no answer for 1 s")
    watched.dog.start()
    until(lambda: watched.triton.num_starts)
    assert "could not be reloaded: models/target/load: no answer for 1 s; killing Triton" in watched.lines[1]


@pytest.mark.parametrize("answers", [[False] * 5, [True, False] * 3], ids=["asked", "asked after a refusal"])
def test_a_triton_that_ends_is_not_blamed_for_its_models(watched: Watched, answers: list[bool]) -> None:
    """Killed together with its processes, it is still there for a moment when they are gone."""
    watched.admin.error = AdminError("models/target/unload: Connection refused")
    left = itertools.chain(answers, itertools.repeat(False))
    watched.admin.is_live = lambda: next(left)  # type: ignore[method-assign]
    for _ in range(4):
        watched.dog._poll()
    assert watched.dog.failure is None and not any("could not" in line for line in watched.lines)


def test_a_model_that_keeps_dying_ends_the_watch(watched: Watched) -> None:
    watched.dog.start()
    watched.dog.join(10)
    assert watched.dog.failure == "model target died 5 times within a minute"
    assert watched.admin.reloaded == ["target"] * 4


def test_triton_that_a_signal_ended_is_started_again_and_given_up_the_fourth_time(watched: Watched) -> None:
    watched.without_models()
    watched.triton.ended, watched.triton.is_fragile = KILLED, True
    watched.dog.start()
    watched.dog.join(10)
    assert watched.triton.num_starts == 3 and watched.dog.failure == KILLED


def test_triton_that_ends_by_itself_is_not_started_again(watched: Watched) -> None:
    watched.triton.ended = "the server ended with status 1: no memory"
    watched.dog.start()
    watched.dog.join(10)
    assert watched.triton.num_starts == 0 and watched.dog.failure == watched.triton.ended


def test_triton_that_does_not_come_up_again_ends_the_watch(watched: Watched) -> None:
    watched.triton.ended, watched.triton.error = KILLED, StartError("not ready after 180 s")
    watched.dog.start()
    watched.dog.join(10)
    assert watched.dog.failure == "not ready after 180 s" and not watched.dog.is_starting
    assert watched.triton.num_starts == 3


def test_triton_without_a_token_is_started_again_after_the_second_probe(watched: Watched) -> None:
    watched.without_models()
    watched.probe.whys = itertools.repeat("no token came")
    watched.dog.start()
    until(lambda: watched.triton.num_starts)
    assert watched.lines[0] == "no token came, for the second time; killing Triton (SPECSERVE_HANG_LIMIT_S)"
    assert watched.probe.num_asked >= 2


def test_a_probe_that_fails_once_harms_nothing(watched: Watched) -> None:
    watched.without_models()
    watched.probe.whys = itertools.cycle(["no token came", None])
    watched.dog.start()
    until(lambda: watched.probe.num_asked > 6)
    assert not watched.triton.num_starts


def test_triton_in_which_many_have_died_is_restarted_once_no_request_runs(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = [1]
    monkeypatch.setattr(watched.drain, "num_running", lambda: running[0])
    watched.without_models().dog._num_deaths = module.WORN_DEATHS
    for _ in range(10):
        watched.dog._poll()
    assert not watched.triton.num_starts
    running[0] = 0
    for _ in range(3):
        watched.dog._poll()
    assert watched.triton.num_starts == 1 and watched.dog._num_deaths == 0 and not watched.drain.is_requested


def test_a_restart_that_is_asked_for_drains_first_and_accepts_requests_afterwards(watched: Watched) -> None:
    was_draining: list[bool] = []

    def change() -> list[str]:
        was_draining.append(watched.drain.is_requested)
        return []

    watched.without_models().dog.start()
    watched.dog.restart(change)
    assert was_draining == [True] and watched.triton.num_starts == 1 and not watched.drain.is_requested


def test_a_restart_that_fails_says_why_and_ends_the_watch(watched: Watched) -> None:
    watched.without_models().triton.error = StartError("model target: broken")
    watched.dog.start()
    with pytest.raises(ServingError, match="model target: broken"):
        watched.dog.restart(list)
    assert watched.dog.failure == "model target: broken" and watched.triton.num_starts == 1


@pytest.mark.parametrize(
    ("started_in_s", "ready_limit_s", "limit_s"),
    [(5.0, 180.0, 60.0), (20.0, 180.0, 80.0), (300.0, 600.0, 600.0), (5.0, 10.0, 10.0)],
)
def test_a_reload_may_take_longer_than_the_start_but_not_for_ever(
    started_in_s: float, ready_limit_s: float, limit_s: float
) -> None:
    assert reload_limit_s(started_in_s, ready_limit_s) == limit_s
