"""The queue: limits that hold under a crowd, the order of arrival, and an answer for everyone who waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from orchestrator.server import admission as module
from orchestrator.server.admission import Admission
from tests.support.admission import Crowd, ScriptedRequest, occupied
from tests.support.hanging import WAIT_S, until


def test_admission_200_at_once_all_run_once_and_never_too_many(make: Callable[..., Admission]) -> None:
    admission, crowd = make(7, 200), Crowd()
    requests = [ScriptedRequest(crowd, number) for number in range(200)]
    barrier, admitted = threading.Barrier(20), []

    def arrive(part: list[ScriptedRequest]) -> None:
        barrier.wait(WAIT_S)
        for request in part:
            admitted.append(admission.admit(request))

    threads = [threading.Thread(target=arrive, args=(requests[i::20],)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert admitted == [True] * 200
    for request in requests:
        assert request.ended.wait(WAIT_S)
    assert [request.num_runs for request in requests] == [1] * 200
    assert not any(request.reasons for request in requests)
    assert 1 <= crowd.most_running <= 7
    until(lambda: admission.num_running == 0)
    assert admission.num_waiting == 0


def test_admission_crowd_larger_than_running_and_waiting_is_refused_exactly_beyond(
    make: Callable[..., Admission],
) -> None:
    admission, crowd = make(3, 5), Crowd()
    _, gate = occupied(admission, crowd)
    waiting = [ScriptedRequest(crowd, number) for number in range(20)]
    assert [admission.admit(request) for request in waiting] == [True] * 5 + [False] * 15
    assert admission.num_waiting == 5 and admission.num_running == 3
    gate.set()
    for request in waiting[:5]:
        assert request.ended.wait(WAIT_S)
    assert not any(request.num_runs or request.reasons for request in waiting[5:])
    until(lambda: admission.num_running == 0)
    assert admission.admit(ScriptedRequest(crowd)), "a full queue is no lasting state"


def test_admission_a_request_that_gets_no_thread_is_answered_and_leaves_its_place(
    make: Callable[..., Admission], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    admission, crowd = make(1, 5), Crowd()
    refused = ScriptedRequest(crowd)
    with monkeypatch.context() as system:
        system.setattr(threading.Thread, "start", no_thread)
        assert admission.admit(refused)
    assert refused.reasons == ["full"] and admission.num_running == 0
    served = ScriptedRequest(crowd)
    assert admission.admit(served) and served.ended.wait(WAIT_S) and served.num_runs == 1


def test_admission_waiting_requests_run_in_the_order_of_their_arrival(make: Callable[..., Admission]) -> None:
    admission, crowd = make(1, 50), Crowd()
    _, gate = occupied(admission, crowd)
    requests = [ScriptedRequest(crowd, number) for number in range(50)]
    assert all(admission.admit(request) for request in requests)
    gate.set()
    for request in requests:
        assert request.ended.wait(WAIT_S)
    assert crowd.began == [-1, *range(50)]
    assert crowd.most_running == 1


@pytest.mark.parametrize("reason", ["cancelled", "deadline"])
def test_admission_waiting_request_that_need_not_wait_is_given_up_and_the_others_stay(
    make: Callable[..., Admission], reason: str
) -> None:
    admission, crowd = make(1, 3), Crowd()
    _, gate = occupied(admission, crowd)
    requests = [ScriptedRequest(crowd, number) for number in range(3)]
    assert all(admission.admit(request) for request in requests)
    if reason == "cancelled":
        requests[1].cancelled = True
    else:
        requests[1].deadline_s = time.monotonic()
    assert requests[1].ended.wait(WAIT_S)
    assert requests[1].reasons == [reason]
    assert admission.num_waiting == 2
    assert admission.admit(replacement := ScriptedRequest(crowd, 3)), "its slot is free again"
    gate.set()
    for request in (requests[0], requests[2], replacement):
        assert request.ended.wait(WAIT_S)
    assert crowd.began == [-1, 0, 2, 3]
    assert requests[1].num_runs == 0 and requests[1].reasons == [reason]


def test_admission_close_gives_up_the_waiting_waits_for_the_running_and_takes_no_more(
    make: Callable[..., Admission],
) -> None:
    admission, crowd = make(2, 4), Crowd()
    running, gate = occupied(admission, crowd)
    waiting = [ScriptedRequest(crowd) for _ in range(4)]
    assert all(admission.admit(request) for request in waiting)
    assert not admission.close(0.0), "two still run"
    assert [request.reasons for request in waiting] == [["shutdown"]] * 4
    assert not admission.admit(late := ScriptedRequest(crowd))
    gate.set()
    assert admission.close(WAIT_S)
    assert all(request.num_runs == 1 and not request.reasons for request in running)
    assert not any(request.num_runs for request in [*waiting, late])


def test_admission_request_that_raises_gives_its_place_back(
    make: Callable[..., Admission], caplog: pytest.LogCaptureFixture
) -> None:
    """A response that cannot be sent must not cost a slot for ever; the log names the request and what raised."""

    class Broken(ScriptedRequest):
        request_id = "r-7"

        def run(self) -> None:
            raise RuntimeError("cannot send")

    admission, crowd = make(1, 10), Crowd()
    for number in range(5):
        assert admission.admit(Broken(crowd, number))
    assert admission.admit(healthy := ScriptedRequest(crowd, 9))
    assert healthy.ended.wait(WAIT_S)
    until(lambda: admission.num_running == 0)
    assert [record.getMessage() for record in caplog.records] == ["request 'r-7': run raised"] * 5


def test_admission_request_that_cannot_be_asked_or_answered_does_not_stop_the_others(
    make: Callable[..., Admission],
) -> None:
    class Broken(ScriptedRequest):
        def is_cancelled(self) -> bool:
            raise RuntimeError("cannot ask")

    class Mute(ScriptedRequest):
        def give_up(self, reason: str) -> None:
            raise RuntimeError("cannot send")

    admission, crowd = make(1, 3), Crowd()
    _, gate = occupied(admission, crowd)
    broken, mute, late = Broken(crowd), Mute(crowd, deadline_s=0.0), ScriptedRequest(crowd, deadline_s=0.0)
    assert all(admission.admit(request) for request in (broken, mute, late))
    assert late.ended.wait(WAIT_S)
    assert late.reasons == ["deadline"]
    gate.set()


class Asked(ScriptedRequest):
    """Counts how often it is asked whether its client has gone."""

    num_asked = 0

    def is_cancelled(self) -> bool:
        self.num_asked += 1
        return super().is_cancelled()


def test_admission_of_many_waiting_requests_so_many_are_asked_in_a_poll_and_all_in_turn(
    make: Callable[..., Admission], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To ask each of 65536 in every poll would take longer than the time between two."""
    monkeypatch.setattr(module, "POLL_S", 1e9)
    monkeypatch.setattr(module, "NUM_ASKED", 3)
    admission, crowd = make(1, 10), Crowd()
    running, gate = occupied(admission, crowd)
    waiting = [Asked(crowd, number) for number in range(8)]
    assert all(admission.admit(request) for request in waiting)
    assert [admission._cancelled() for _ in range(3)] == [{}] * 3
    assert [request.num_asked for request in waiting] == [1] * 8
    waiting[4].cancelled = True
    found = [[gone.request for gone in admission._cancelled()] for _ in range(3)]
    assert found == [[], [waiting[4]], []]
    waiting[7].deadline_s = 0.0
    assert [late.request for late in admission._late()] == [waiting[7]], "deadlines are looked at in every poll"
    assert admission._cancelled() == {}
    admission._give_up(dict.fromkeys(admission._waiting[:2], "deadline"))
    assert [gone.request for gone in admission._cancelled()] == [waiting[4]], "the turn is the slot in the queue"
    gate.set()
    assert all(request.ended.wait(WAIT_S) for request in (*running, *waiting))
    assert admission.close(WAIT_S)


class Wide(ScriptedRequest):
    """Takes several slots."""

    def __init__(self, crowd: Crowd, number: int, slots: int, gate: threading.Event) -> None:
        super().__init__(crowd, number, gate=gate)
        self.num_slots = slots


def test_a_request_takes_as_many_places_as_it_says_and_waits_for_them_in_its_turn(
    make: Callable[..., Admission],
) -> None:
    crowd, admission = Crowd(), make(max_running=4, max_waiting=4)
    gates = [threading.Event() for _ in range(4)]
    two, three, one, last = (Wide(crowd, i, slots, gates[i]) for i, slots in enumerate((2, 3, 1, 2)))
    for request in (two, three, one, last):
        assert admission.admit(request)
    assert (admission.num_running, admission.num_waiting) == (2, 3), "what fits does not overtake what came before"
    gates[0].set()
    assert two.ended.wait(5)
    until(lambda: admission.num_running == 4)
    assert admission.num_waiting == 1, "three and one run, side by side"
    gates[1].set()
    assert three.ended.wait(5)
    until(lambda: admission.num_running == 3)
    for gate in gates:
        gate.set()
    assert all(request.ended.wait(5) for request in (one, last))
    until(lambda: admission.num_running == 0)
    assert admission.close(1.0)


def test_a_wide_request_is_refused_when_the_queue_is_full_and_those_before_it_stay(
    make: Callable[..., Admission],
) -> None:
    crowd, admission, gate = Crowd(), make(max_running=2, max_waiting=1), threading.Event()
    running, waiting, refused = (Wide(crowd, i, 2, gate) for i in range(3))
    assert admission.admit(running) and admission.admit(waiting) and not admission.admit(refused)
    gate.set()
    assert running.ended.wait(5) and waiting.ended.wait(5)
    until(lambda: admission.num_running == 0)
    assert refused.num_runs == 0 and admission.close(1.0)
