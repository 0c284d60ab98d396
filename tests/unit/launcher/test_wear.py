"""Triton is replaced after many deaths: when no request runs, or in the end whatever runs; without a server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher import wear as module
from launcher.triton_process import StartError
from launcher.wear import IDLE_POLLS, MAX_DEATHS, WORN_DEATHS, Wear
from orchestrator.core.deployment.drain_state import Drain
from orchestrator.server.running_slots import SharedRunningSlots
from orchestrator.server.tenants import Taking
from tests.support.hanging import until


class Deployment:
    """The slots of a deployment, and the wear of its Triton."""

    def __init__(self, folder: Path) -> None:
        self.slots, self.drain, self.lines = SharedRunningSlots(folder, 4), Drain(folder), list[str]()
        self.is_stopped = False
        self.wear = Wear(folder, 10.0, lambda: self.is_stopped, self.lines.append)

    def die(self, times: int) -> None:
        for _ in range(times):
            self.wear.note_death()

    def begin_request(self) -> None:
        assert self.slots.take(1) is Taking.TAKEN
        self.slots.claim([])

    def looks(self, times: int) -> set[str]:
        return {self.wear.why_replace() for _ in range(times)}


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return Deployment(tmp_path)


def test_few_deaths_are_no_reason(deployment: Deployment) -> None:
    deployment.die(WORN_DEATHS - 1)
    assert deployment.looks(2 * IDLE_POLLS) == {""} and not deployment.drain.is_requested


def test_after_many_it_is_replaced_once_no_request_has_run_for_some_looks(deployment: Deployment) -> None:
    deployment.die(WORN_DEATHS)
    deployment.begin_request()
    assert deployment.looks(2 * IDLE_POLLS) == {""}
    deployment.slots.give_back(1)
    assert deployment.looks(IDLE_POLLS - 1) == {""} and not deployment.drain.is_requested
    why = "16 processes of models have died since Triton was started, which keeps their threads; no request runs"
    assert deployment.wear.why_replace() == why
    assert deployment.drain.is_requested, "a request that came now would be lost"
    assert deployment.wear.finish_requests() and deployment.lines == []
    deployment.wear.accept_requests()
    deployment.wear.restart()
    assert not deployment.drain.is_requested and deployment.looks(2 * IDLE_POLLS) == {""}


def test_a_request_that_comes_at_the_last_moment_runs_on(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(num_running: Callable[[], int], limit_s: float, is_cut_short: Callable[[], bool]) -> bool:
        assert deployment.drain.is_requested
        return False

    deployment.die(WORN_DEATHS)
    with monkeypatch.context() as patch:
        patch.setattr(module, "wait_until_idle", wait)
        assert deployment.looks(IDLE_POLLS) == {""} and not deployment.drain.is_requested
    assert deployment.looks(IDLE_POLLS - 1) == {""}, "it waits for the next moment like this"
    assert "no request runs" in deployment.wear.why_replace()


def test_without_such_a_moment_it_is_replaced_after_a_drain(deployment: Deployment) -> None:
    deployment.wear._limit_s = 0.2
    deployment.begin_request()
    deployment.die(MAX_DEATHS - 1)
    assert deployment.looks(2 * IDLE_POLLS) == {""}
    deployment.die(1)
    assert "48 processes" in (why := deployment.wear.why_replace()) and "requests have run all the time" in why
    assert not deployment.drain.is_requested
    assert deployment.wear.finish_requests() and deployment.drain.is_requested
    said = ["draining: 1 sequences run, stopping in 0.2 s at the latest", "stopping: requests still run"]
    assert deployment.lines == said


def test_a_server_that_is_being_stopped_is_left_alone(deployment: Deployment) -> None:
    deployment.die(MAX_DEATHS)
    deployment.is_stopped = True
    assert deployment.looks(2 * IDLE_POLLS) == {""}
    assert not deployment.wear.finish_requests()


def test_an_operator_s_drain_outlives_a_replacement(deployment: Deployment) -> None:
    deployment.die(WORN_DEATHS)
    assert any(deployment.looks(IDLE_POLLS))
    deployment.drain.begin()
    deployment.wear.accept_requests()
    assert deployment.drain.is_requested
    deployment.drain.cancel()
    assert not deployment.drain.is_requested


def test_the_watch_counts_deaths_of_models(watched: Any) -> None:
    watch, _, _ = watched
    watch.start()
    watch.join(10)  # it gives up: the model keeps dying
    assert watch._wear._num_deaths == 4


def test_a_worn_triton_is_replaced_as_often_as_needed_and_the_server_stays_live(serving: Any, watched: Any) -> None:
    """It is no failure of Triton, and does not count towards the starts at which the watch gives up."""
    (watch, triton), lines, seen = serving, watched[2], []
    start = triton.start

    def look_and_start() -> None:
        seen.append((watch.why_not_live(), watch.why_not_ready(), Drain(watch._folder).is_requested))
        start()

    triton.start = look_and_start
    watch.start()
    for number in range(1, 7):
        for _ in range(WORN_DEATHS):
            watch._wear.note_death()
        until(lambda number=number: triton.num_starts == number and not watch.is_starting)  # type: ignore[misc]
        until(lambda: not Drain(watch._folder).is_requested)
    assert seen == [(None, "the server has ended and is being started again", True)] * 6
    assert watch.failure is None and watch.num_errors == 0 and not watch._starts
    assert lines[0].startswith("16 processes of models have died") and lines[0].endswith("; replacing Triton")
    assert len(lines) == 12 and all("ready again after" in line for line in lines[1::2])


def test_a_replacement_that_does_not_start_is_started_again_and_ends_the_watch(serving: Any) -> None:
    watch, triton = serving
    triton.error = StartError("address already in use")
    for _ in range(WORN_DEATHS):
        watch._wear.note_death()
    watch.start()
    watch.join(10)
    assert triton.num_starts == 1 + 3 and watch.failure == "address already in use"
