"""Admission: limits that hold under a crowd, the order of arrival, and an answer for everyone who waits."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway.triton import ReplicaFull
from orchestrator.core.errors import public_text
from orchestrator.deployment.config import ServingConfig
from orchestrator.triton import admission as module
from orchestrator.triton.admission import Admission, ServiceRate, queue_full
from orchestrator.triton.places import SharedPlaces, Taking
from tests.support.hanging import WAIT_S, until


class Crowd:
    """Counts who runs at once, and in which order they began."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_running = self.most_running = 0
        self.began: list[int] = []

    def enter(self, number: int) -> None:
        with self.lock:
            self.began.append(number)
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)

    def leave(self) -> None:
        with self.lock:
            self.num_running -= 1


class ScriptedRequest:
    """Runs until its gate opens; notes what becomes of it."""

    num_places, priority, tenant, request_id = 1, 0, "", ""

    def __init__(
        self, crowd: Crowd, number: int = 0, deadline_s: float = 1e12, gate: threading.Event | None = None
    ) -> None:
        self.crowd, self.number, self.deadline_s, self.gate = crowd, number, deadline_s, gate
        self.cancelled = False
        self.num_runs = 0
        self.reasons: list[str] = []
        self.ended = threading.Event()

    def run(self) -> None:
        self.num_runs += 1
        self.crowd.enter(self.number)
        if self.gate:
            assert self.gate.wait(WAIT_S)
        self.crowd.leave()
        self.ended.set()

    def is_cancelled(self) -> bool:
        return self.cancelled

    def give_up(self, reason: str) -> None:
        self.reasons.append(reason)
        self.ended.set()


@pytest.fixture(params=["own places", "shared places"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[int, int], Admission]]:
    made: list[Admission] = []

    def _make(max_running: int, max_waiting: int) -> Admission:
        folder = tmp_path / "places" if request.param == "shared places" else None
        made.append(Admission(max_running, max_waiting, folder))
        return made[-1]

    yield _make
    for admission in made:
        assert admission.close(WAIT_S)


def occupied(admission: Admission, crowd: Crowd) -> tuple[list[ScriptedRequest], threading.Event]:
    """Fill every place with a request that waits for the gate."""
    gate = threading.Event()
    requests = [ScriptedRequest(crowd, -1, gate=gate) for _ in range(admission.max_running)]
    assert all(admission.admit(request) for request in requests)
    until(lambda: crowd.num_running == admission.max_running)
    return requests, gate


def test_admission_200_at_once_all_run_once_and_never_too_many(make: Callable[[int, int], Admission]) -> None:
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
    make: Callable[[int, int], Admission],
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
    make: Callable[[int, int], Admission], monkeypatch: pytest.MonkeyPatch
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


def test_admission_a_request_that_is_larger_than_limits_lowered_since_is_refused(
    make: Callable[[int, int], Admission],
) -> None:
    """It was read with the settings before a reload; nothing would ever begin behind it."""
    admission, crowd = make(4, 5), Crowd()
    admission.resize(2, 5, None)
    large = ScriptedRequest(crowd)
    large.num_places = 4
    assert not admission.admit(large)
    small = ScriptedRequest(crowd)
    assert admission.admit(small) and small.ended.wait(WAIT_S)


def test_admission_waiting_requests_run_in_the_order_of_their_arrival(make: Callable[[int, int], Admission]) -> None:
    admission, crowd = make(1, 50), Crowd()
    _, gate = occupied(admission, crowd)
    requests = [ScriptedRequest(crowd, number) for number in range(50)]
    assert all(admission.admit(request) for request in requests)
    gate.set()
    for request in requests:
        assert request.ended.wait(WAIT_S)
    assert crowd.began == [-1, *range(50)]
    assert crowd.most_running == 1


def test_admission_no_queue_refuses_at_once(make: Callable[[int, int], Admission]) -> None:
    admission, crowd = make(1, 0), Crowd()
    _, gate = occupied(admission, crowd)
    assert not admission.admit(ScriptedRequest(crowd))
    gate.set()


@pytest.mark.parametrize("reason", ["cancelled", "deadline"])
def test_admission_waiting_request_that_need_not_wait_is_given_up_and_the_others_stay(
    make: Callable[[int, int], Admission], reason: str
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
    assert admission.admit(replacement := ScriptedRequest(crowd, 3)), "its place is free again"
    gate.set()
    for request in (requests[0], requests[2], replacement):
        assert request.ended.wait(WAIT_S)
    assert crowd.began == [-1, 0, 2, 3]
    assert requests[1].num_runs == 0 and requests[1].reasons == [reason]


def test_admission_running_request_is_left_alone_when_cancelled(make: Callable[[int, int], Admission]) -> None:
    admission, crowd = make(1, 1), Crowd()
    (running,), gate = occupied(admission, crowd)
    running.cancelled, running.deadline_s = True, 0.0
    assert admission.admit(waiting := ScriptedRequest(crowd, deadline_s=0.0))
    assert waiting.ended.wait(WAIT_S)  # the reaper has been round
    assert running.reasons == [] and admission.num_running == 1
    gate.set()


def test_admission_close_gives_up_the_waiting_waits_for_the_running_and_takes_no_more() -> None:
    admission, crowd = Admission(2, 4), Crowd()
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
    make: Callable[[int, int], Admission], caplog: pytest.LogCaptureFixture
) -> None:
    """A response that cannot be sent must not cost a place for ever; the log names the request and what raised."""

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
    make: Callable[[int, int], Admission],
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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To ask each of 65536 in every poll would take longer than the time between two."""
    monkeypatch.setattr(module, "POLL_S", 1e9)
    monkeypatch.setattr(module, "NUM_ASKED", 3)
    admission, crowd = Admission(1, 10), Crowd()
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
    assert [gone.request for gone in admission._cancelled()] == [waiting[4]], "the turn is the place in the queue"
    gate.set()
    assert all(request.ended.wait(WAIT_S) for request in (*running, *waiting))
    assert admission.close(WAIT_S)


class Wide(ScriptedRequest):
    """Takes several places."""

    def __init__(self, crowd: Crowd, number: int, places: int, gate: threading.Event) -> None:
        super().__init__(crowd, number, gate=gate)
        self.num_places = places


def test_a_request_takes_as_many_places_as_it_says_and_waits_for_them_in_its_turn() -> None:
    crowd, admission = Crowd(), Admission(max_running=4, max_waiting=4)
    gates = [threading.Event() for _ in range(4)]
    two, three, one, last = (Wide(crowd, i, places, gates[i]) for i, places in enumerate((2, 3, 1, 2)))
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


def test_a_wide_request_is_refused_when_the_queue_is_full_and_those_before_it_stay() -> None:
    crowd, admission, gate = Crowd(), Admission(max_running=2, max_waiting=1), threading.Event()
    running, waiting, refused = (Wide(crowd, i, 2, gate) for i in range(3))
    assert admission.admit(running) and admission.admit(waiting) and not admission.admit(refused)
    gate.set()
    assert running.ended.wait(5) and waiting.ended.wait(5)
    until(lambda: admission.num_running == 0)
    assert refused.num_runs == 0 and admission.close(1.0)


def test_who_stood_behind_a_wide_request_that_gave_up_starts_at_once() -> None:
    crowd, admission, gate = Crowd(), Admission(max_running=4, max_waiting=4), threading.Event()
    running, wide, small = Wide(crowd, 0, 1, gate), Wide(crowd, 1, 4, gate), Wide(crowd, 2, 1, gate)
    for request in (running, wide, small):
        assert admission.admit(request)
    wide.cancelled = True
    until(lambda: admission.num_running == 2)
    assert admission.num_waiting == 0 and wide.num_runs == 0
    gate.set()
    assert small.ended.wait(5) and running.ended.wait(5)
    until(lambda: admission.num_running == 0)
    assert admission.close(1.0)


# Priorities and tenants


def request_of(
    crowd: Crowd, number: int, priority: int = 0, tenant: str = "", gate: threading.Event | None = None
) -> ScriptedRequest:
    request = ScriptedRequest(crowd, number, gate=gate)
    request.priority, request.tenant = priority, tenant
    return request


def test_the_more_urgent_request_goes_first_and_equals_in_the_order_of_their_arrival(
    make: Callable[[int, int], Admission],
) -> None:
    admission, crowd = make(1, 10), Crowd()
    _, gate = occupied(admission, crowd)
    requests = [request_of(crowd, number, priority) for number, priority in enumerate((0, 5, -5, 0, -5, 5))]
    assert all(admission.admit(request) for request in requests)
    gate.set()
    for request in requests:
        assert request.ended.wait(WAIT_S)
    assert crowd.began == [-1, 2, 4, 0, 3, 1, 5]


def test_a_request_that_has_waited_long_goes_before_one_that_is_more_urgent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGING_S", 0.02)
    admission, crowd = Admission(1, 10), Crowd()
    _, gate = occupied(admission, crowd)
    old, urgent, most_urgent = request_of(crowd, 0), request_of(crowd, 1, -2), request_of(crowd, 2, -10)
    assert admission.admit(old)
    time.sleep(0.06)
    assert admission.admit(urgent) and admission.admit(most_urgent)
    gate.set()
    for request in (old, urgent, most_urgent):
        assert request.ended.wait(WAIT_S)
    assert crowd.began == [-1, 2, 0, 1]
    assert admission.close(WAIT_S)


def test_an_urgent_request_takes_the_place_of_the_last_in_a_full_queue(make: Callable[[int, int], Admission]) -> None:
    admission, crowd = make(1, 2), Crowd()
    _, gate = occupied(admission, crowd)
    first, last, urgent = request_of(crowd, 0), request_of(crowd, 1), request_of(crowd, 2, -1)
    assert admission.admit(first) and not admission.would_refuse()
    assert admission.admit(last) and admission.would_refuse()
    assert not admission.admit(request_of(crowd, 3)) and not admission.admit(request_of(crowd, 4, 1))
    assert admission.admit(urgent)
    assert last.reasons == ["full"] and last.num_runs == 0
    gate.set()
    assert first.ended.wait(WAIT_S) and urgent.ended.wait(WAIT_S)
    assert crowd.began == [-1, 2, 0]


@pytest.fixture(params=["own places", "shared places"])
def fair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Admission]:
    """Four places, two at most of a tenant."""
    admission = Admission(4, 4, tmp_path / "places" if request.param == "shared places" else None, tenant_limit=2)
    yield admission
    assert admission.close(WAIT_S)


def test_a_tenant_at_its_limit_waits_and_the_others_pass_it(fair: Admission) -> None:
    crowd, gate = Crowd(), threading.Event()
    greedy = [request_of(crowd, number, tenant="greedy", gate=gate) for number in range(4)]
    assert all(fair.admit(request) for request in greedy)
    assert (fair.num_running, fair.num_waiting) == (2, 2)
    assert fair.admit(modest := request_of(crowd, 9, tenant="modest", gate=gate))
    until(lambda: modest.num_runs == 1)
    assert (fair.num_running, fair.num_waiting) == (3, 2)
    gate.set()
    assert all(request.ended.wait(WAIT_S) for request in (*greedy, modest))
    assert crowd.most_running <= 4 and not any(request.reasons for request in greedy)


def test_a_wide_request_of_a_tenant_at_its_limit_is_passed_by_the_others_but_not_by_its_own(fair: Admission) -> None:
    crowd, gate = Crowd(), threading.Event()
    first, wide, late = (request_of(crowd, number, tenant="greedy", gate=gate) for number in range(3))
    wide.num_places = 2
    other = request_of(crowd, 9, tenant="modest", gate=gate)
    assert all(fair.admit(request) for request in (first, wide, late, other))
    until(lambda: other.num_runs == 1)
    assert (wide.num_runs, late.num_runs) == (0, 0), "late would fit, and the wide one would wait for ever"
    gate.set()
    assert wide.ended.wait(WAIT_S) and late.ended.wait(WAIT_S)
    assert crowd.began[-2:] == [1, 2]


def test_a_full_queue_takes_the_last_request_of_the_tenant_that_has_the_most(fair: Admission) -> None:
    crowd, gate = Crowd(), threading.Event()
    for tenant in ("a", "b"):
        assert all(fair.admit(request_of(crowd, -1, tenant=tenant, gate=gate)) for _ in range(2))
    greedy = [request_of(crowd, number, tenant="greedy") for number in range(4)]
    assert all(fair.admit(request) for request in greedy)
    assert not fair.would_refuse(), "it depends on whose request comes"
    assert fair.admit(modest := request_of(crowd, 9, tenant="modest"))
    assert [request.reasons for request in greedy] == [[], [], [], ["full"]]
    assert not fair.admit(request_of(crowd, 8, tenant="greedy"))
    gate.set()
    assert modest.ended.wait(WAIT_S) and all(request.ended.wait(WAIT_S) for request in greedy)


def test_a_tenant_has_one_limit_in_all_processes_and_a_killed_one_holds_none(tmp_path: Path) -> None:
    here, there = SharedPlaces(tmp_path, 6, 2), SharedPlaces(tmp_path, 6, 2)
    assert here.take(1, "x") is Taking.TAKEN and there.take(1, "x") is Taking.TAKEN
    assert here.take(1, "x") is there.take(1, "x") is Taking.TENANT_AT_LIMIT
    assert there.take(2, "y") is Taking.TAKEN and here.take(1, "y") is Taking.TENANT_AT_LIMIT
    there.give_back(1, "x")
    assert here.take(1, "x") is Taking.TAKEN and there.take(1, "x") is Taking.TENANT_AT_LIMIT
    assert here.take(3, "z") is Taking.TENANT_AT_LIMIT, "more than any tenant may have"


def test_a_tenant_limit_that_a_reload_sets_counts_the_places_that_were_taken_without_one(tmp_path: Path) -> None:
    here, there = SharedPlaces(tmp_path, 6, 2), SharedPlaces(tmp_path, 6, 2)
    assert here.take(2, "a") is Taking.TAKEN
    here.give_back(2, "a")
    for places in (here, there):
        places.resize(6, None)
    assert here.take(2, "b") is Taking.TAKEN
    for places in (here, there):
        places.resize(6, 2)
    assert there.take(1, "b") is Taking.TENANT_AT_LIMIT, "it holds two places in the other process"
    assert there.take(2, "a") is Taking.TAKEN, "it held places before, but holds none now"


def test_the_hint_is_the_time_that_the_queue_takes_at_the_measured_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    rate = ServiceRate()
    assert rate.seconds_for(50) == 1, "nothing is known yet"
    for _ in range(4):
        now_s += 2.0
        rate.note(1)
    assert rate.seconds_for(1) == 2 and rate.seconds_for(5) == 10
    now_s += 8.0  # nothing ends any more
    assert rate.seconds_for(5) == 20
    assert rate.seconds_for(10_000) == module.LONGEST_HINT_S
    for _ in range(module.NUM_ENDS + 1):
        now_s += 0.5
        rate.note(2)
    assert rate.seconds_for(40) == 10, "only the newest ends count"


# Places that several processes share; each Admission here stands for the one of a process


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Admission, Admission]]:
    made = Admission(3, 300, tmp_path), Admission(3, 300, tmp_path)
    yield made
    for admission in made:
        assert admission.close(WAIT_S)


def test_shared_places_hold_for_all_processes_together(pair: tuple[Admission, Admission]) -> None:
    """Each public model used to have max_running places of its own."""
    crowd = Crowd()
    requests = [ScriptedRequest(crowd, number) for number in range(40)]
    assert all(pair[number % 2].admit(request) for number, request in enumerate(requests))
    until(lambda: all(request.ended.is_set() for request in requests))
    assert crowd.most_running <= 3 and [request.num_runs for request in requests] == [1] * 40


def test_shared_place_that_another_process_frees_is_noticed(pair: tuple[Admission, Admission]) -> None:
    crowd = Crowd()
    _, gate = occupied(pair[0], crowd)
    assert pair[1].admit(waiting := ScriptedRequest(crowd))
    assert (pair[1].num_running, pair[1].num_waiting) == (0, 1)
    gate.set()
    assert waiting.ended.wait(WAIT_S)


def test_shared_places_go_to_both_processes_while_both_have_requests_waiting(
    pair: tuple[Admission, Admission],
) -> None:
    """A process that frees a place does not always take it again itself."""
    crowd = Crowd()

    class Brief(ScriptedRequest):
        def run(self) -> None:
            time.sleep(0.02)
            super().run()

    busy = [Brief(crowd, 0) for _ in range(200)]
    assert all(pair[0].admit(request) for request in busy)
    late = [Brief(crowd, 1) for _ in range(2)]
    assert all(pair[1].admit(request) for request in late)
    until(lambda: all(request.ended.is_set() for request in late))
    assert not all(request.ended.is_set() for request in busy)
    until(lambda: all(request.ended.is_set() for request in busy))


def test_shared_places_request_that_needs_several_is_not_starved_by_another_process(
    pair: tuple[Admission, Admission],
) -> None:
    crowd, gates = Crowd(), [threading.Event() for _ in range(3)]
    for gate in gates:
        assert pair[0].admit(ScriptedRequest(crowd, 0, gate=gate))
    wide = ScriptedRequest(crowd, 1)
    wide.num_places = 3
    assert pair[1].admit(wide)
    gates[0].set()
    until(lambda: pair[0].num_running == 2)
    assert pair[0].admit(narrow := ScriptedRequest(crowd, 2)) and narrow.num_runs == 0, "it came after the wide one"
    for gate in gates[1:]:
        gate.set()
    assert wide.ended.wait(WAIT_S) and narrow.ended.wait(WAIT_S)
    assert crowd.began[-2:] == [1, 2]


def test_shared_places_of_a_process_that_was_killed_are_free_again(tmp_path: Path) -> None:
    code = (
        "import pathlib, time\n"
        "from orchestrator.triton.places import SharedPlaces\n"
        f"places = SharedPlaces(pathlib.Path({str(tmp_path)!r}), 2)\n"
        "print(places.take(2).name, places.take(1).name, flush=True)\n"
        "time.sleep(60)\n"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert other.stdout and other.stdout.readline() == "TAKEN TOO_FEW\n"
    places = SharedPlaces(tmp_path, 2)
    assert places.take(1) is Taking.TOO_FEW
    other.kill()
    other.communicate(timeout=WAIT_S)
    assert places.take(2) is Taking.TAKEN and places.take(1) is Taking.TOO_FEW
    places.give_back(2)
    assert places.take(1) is Taking.TAKEN


@pytest.mark.parametrize("shared", [False, True], ids=["one process", "shared places"])
def test_limits_can_be_changed_while_requests_run(tmp_path: Path, shared: bool) -> None:
    crowd, gate = Crowd(), threading.Event()
    admission = Admission(3, 8, tmp_path if shared else None)
    running = [ScriptedRequest(crowd, number, gate=gate) for number in range(3)]
    assert all(map(admission.admit, running))
    until(lambda: crowd.num_running == 3)
    admission.resize(1, 1, None)
    waiting = ScriptedRequest(crowd, 3)
    assert admission.admit(waiting) and not admission.admit(ScriptedRequest(crowd, 5)), "one may wait, and no second"
    gate.set()
    assert waiting.ended.wait(WAIT_S)
    gate.clear()
    last = [ScriptedRequest(crowd, number, gate=gate) for number in (6, 7)]
    assert all(map(admission.admit, last))
    until(lambda: crowd.num_running == 1)
    admission.resize(2, 8, None)
    gate.set()
    assert all(request.ended.wait(WAIT_S) for request in last)
    assert admission.close(WAIT_S)


def test_a_waiting_request_that_could_never_begin_any_more_is_given_up() -> None:
    crowd, gate = Crowd(), threading.Event()
    admission = Admission(2, 8)
    running, large = ScriptedRequest(crowd, 0, gate=gate), ScriptedRequest(crowd, 1)
    large.num_places = 2
    assert admission.admit(running) and admission.admit(large)
    admission.resize(1, 8, None)
    assert large.reasons == ["full"] and not large.num_runs
    gate.set()
    assert admission.close(WAIT_S)


def test_a_refusal_tells_whether_another_salt_may_have_room() -> None:
    config = ServingConfig(target="t", max_running=2, max_waiting=3)
    assert public_text(queue_full(config, 4)) == (
        "full: 2 requests run and 3 wait; try again in 4 s (max_running, max_waiting in the deployment file)"
    )
    shared = queue_full(config.model_copy(update={"max_running_per_salt": 1}), 4)
    assert public_text(shared).startswith("full_for_salt: ")
    assert ReplicaFull(str(shared)).retry_after_s == 4
