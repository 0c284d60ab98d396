"""Places that several processes share; each Admission here stands for the one of a process."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.server import admission as admission_module
from orchestrator.server import claims
from orchestrator.server.admission import Admission
from orchestrator.server.claims import Claim
from orchestrator.server.running_slots import RunningSlots, SharedRunningSlots
from orchestrator.server.tenants import NO_LIMITS, Taking, TenantLimits, digest_of
from tests.support.admission import Crowd, ScriptedRequest, occupied
from tests.support.hanging import WAIT_S, until

TWO = TenantLimits(slots=2)


def test_a_tenant_has_one_limit_in_all_processes_and_a_killed_one_holds_none(tmp_path: Path) -> None:
    here, there = SharedRunningSlots(tmp_path, 6, TWO), SharedRunningSlots(tmp_path, 6, TWO)
    assert here.take(1, "x") is Taking.TAKEN and there.take(1, "x") is Taking.TAKEN
    assert here.take(1, "x") is there.take(1, "x") is Taking.TENANT_AT_LIMIT
    assert there.take(2, "y") is Taking.TAKEN and here.take(1, "y") is Taking.TENANT_AT_LIMIT
    there.give_back(1, "x")
    assert here.take(1, "x") is Taking.TAKEN and there.take(1, "x") is Taking.TENANT_AT_LIMIT
    assert here.take(3, "z") is Taking.TENANT_AT_LIMIT, "more than any tenant may have"


def test_a_tenant_limit_that_a_reload_sets_counts_the_places_that_were_taken_without_one(tmp_path: Path) -> None:
    here, there = SharedRunningSlots(tmp_path, 6, TWO), SharedRunningSlots(tmp_path, 6, TWO)
    assert here.take(2, "a") is Taking.TAKEN
    here.give_back(2, "a")
    for slots in (here, there):
        slots.resize(6, NO_LIMITS)
    assert here.take(2, "b") is Taking.TAKEN
    for slots in (here, there):
        slots.resize(6, TWO)
    assert there.take(1, "b") is Taking.TENANT_AT_LIMIT, "it holds two slots in the other process"
    assert there.take(2, "a") is Taking.TAKEN, "it held slots before, but holds none now"


def test_a_tenant_has_one_limit_of_tokens_in_all_processes(tmp_path: Path) -> None:
    limits = TenantLimits(tokens=100)
    here, there = SharedRunningSlots(tmp_path, 6, limits), SharedRunningSlots(tmp_path, 6, limits)
    assert here.take(1, "x", 60) is Taking.TAKEN and there.take(1, "x", 40) is Taking.TAKEN
    assert here.take(1, "x", 1) is there.take(1, "x", 1) is Taking.TENANT_AT_LIMIT
    assert there.take(1, "y", 100) is Taking.TAKEN and here.take(1, "y", 1) is Taking.TENANT_AT_LIMIT
    here.give_back(1, "x", 60)
    assert there.take(3, "x", 21) is Taking.TENANT_AT_LIMIT
    assert there.take(3, "x", 20) is Taking.TAKEN


@pytest.mark.parametrize("is_shared", [False, True])
def test_tokens_that_are_given_back_can_be_taken_again(tmp_path: Path, is_shared: bool) -> None:
    limits = TenantLimits(tokens=100)
    slots = SharedRunningSlots(tmp_path, 6, limits) if is_shared else RunningSlots(6, limits)
    assert slots.take(1, "x", 60) is Taking.TAKEN and slots.take(2, "x", 20) is Taking.TAKEN
    slots.give_back(2, "x", 20)
    assert slots.take(1, "x", 41) is Taking.TENANT_AT_LIMIT and slots.take(1, "x", 40) is Taking.TAKEN
    slots.give_back(1, "x", 60)
    assert slots.take(3, "x", 20) is Taking.TAKEN


def test_a_limit_of_tokens_that_a_reload_sets_counts_the_slots_that_were_taken_without_one(tmp_path: Path) -> None:
    here, there = SharedRunningSlots(tmp_path, 6), SharedRunningSlots(tmp_path, 6)
    assert here.take(2, "x", 30) is Taking.TAKEN
    for slots in (here, there):
        slots.resize(6, TenantLimits(tokens=100))
    assert there.take(1, "x", 41) is Taking.TENANT_AT_LIMIT
    assert here.take(1, "x", 40) is Taking.TAKEN


def test_a_request_that_waits_for_slots_goes_before_later_ones_of_the_other_process(tmp_path: Path) -> None:
    here, there = SharedRunningSlots(tmp_path, 2), SharedRunningSlots(tmp_path, 2)
    assert there.take(1, "x", turn_s=1.0) is Taking.TAKEN
    assert here.take(2, "y", turn_s=2.0) is Taking.TOO_FEW
    here.claim([Claim(2.0, digest_of("y"), is_at_limit=False)])
    assert there.take(1, "x", turn_s=3.0) is Taking.TOO_FEW, "it would fit, but the wide one has waited for longer"
    assert there.take(1, "x", turn_s=1.5) is Taking.TAKEN, "its turn is earlier"
    there.give_back(1, "x")
    here.claim([])
    assert there.take(1, "x", turn_s=3.0) is Taking.TAKEN, "nobody waits here any more"


def test_a_request_of_a_tenant_at_its_limit_goes_before_later_ones_of_this_tenant_only(tmp_path: Path) -> None:
    here, there = SharedRunningSlots(tmp_path, 6, TWO), SharedRunningSlots(tmp_path, 6, TWO)
    assert there.take(1, "x", turn_s=1.0) is Taking.TAKEN
    assert here.take(2, "x", turn_s=2.0) is Taking.TENANT_AT_LIMIT
    here.claim([Claim(2.0, digest_of("x"), is_at_limit=True)])
    assert there.take(1, "x", turn_s=3.0) is Taking.TENANT_AT_LIMIT, "it would fit, but it came later"
    assert there.take(2, "y", turn_s=3.0) is Taking.TAKEN
    assert there.take(1, "x", turn_s=1.5) is Taking.TAKEN, "its turn is earlier"
    there.give_back(2, "x")
    assert here.take(2, "x", turn_s=2.0) is Taking.TAKEN


def test_claims_of_a_process_that_is_stopped_do_not_hold_up_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = SharedRunningSlots(tmp_path, 2), SharedRunningSlots(tmp_path, 2)
    here.claim([Claim(1.0, digest_of(""), is_at_limit=False)])
    assert there.take(1, turn_s=2.0) is Taking.TOO_FEW
    monkeypatch.setattr(claims, "STALE_S", -1.0)
    assert there.take(1, turn_s=2.0) is Taking.TAKEN


def test_a_process_that_frees_a_slot_or_claims_none_any_more_wakes_those_that_wait(tmp_path: Path) -> None:
    here, there = SharedRunningSlots(tmp_path, 2), SharedRunningSlots(tmp_path, 2)
    assert here.take(2) is Taking.TAKEN
    here.give_back(1)
    here.claim([])
    assert not there.wait_for_others(0.01), "nothing waits there"
    there.claim([Claim(1.0, digest_of(""), is_at_limit=False)])
    here.give_back(1)
    here.claim([])
    assert there.wait_for_others(WAIT_S) and not there.wait_for_others(0.01)
    here.claim([Claim(0.5, digest_of(""), is_at_limit=False)])
    assert there.wait_for_others(WAIT_S)
    here.claim([Claim(0.5, digest_of(""), is_at_limit=False)])
    assert not there.wait_for_others(0.01), "it has only renewed its claim"
    here.claim([])
    assert there.wait_for_others(WAIT_S)


def test_a_process_takes_the_place_of_one_that_has_ended(tmp_path: Path) -> None:
    code = (
        "import pathlib\n"
        "from orchestrator.server.running_slots import SharedRunningSlots\n"
        f"SharedRunningSlots(pathlib.Path({str(tmp_path)!r}), 2)\n"
    )
    here = SharedRunningSlots(tmp_path, 2)
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code], check=True, timeout=WAIT_S)
    there = SharedRunningSlots(tmp_path, 2)
    assert sorted(file.name for file in tmp_path.glob("waiting-*")) == ["waiting-0", "waiting-1"]
    there.claim([Claim(1.0, digest_of(""), is_at_limit=False)])
    assert here.take(1, turn_s=2.0) is Taking.TOO_FEW


def test_files_are_closed_with_their_owner(tmp_path: Path) -> None:
    pair = [SharedRunningSlots(tmp_path, 3), SharedRunningSlots(tmp_path, 3)]
    for slots in pair:
        assert slots.take(1) is Taking.TAKEN
        slots.resize(5, NO_LIMITS)

    def opened() -> list[str]:
        links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return [str(link.readlink()) for link in links if tmp_path in link.readlink().parents]

    assert len(opened()) == 2 * (5 + 1 + 2 * 2)
    del pair, slots
    gc.collect()
    assert not opened()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Admission, Admission]]:
    made = Admission(3, 300, tmp_path), Admission(3, 300, tmp_path)
    yield made
    for admission in made:
        assert admission.close(WAIT_S)


def test_shared_places_hold_for_all_processes_together(pair: tuple[Admission, Admission]) -> None:
    """Each public model used to have max_running slots of its own."""
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
    """A process that frees a slot does not always take it again itself."""
    crowd = Crowd()

    class Brief(ScriptedRequest):
        def run(self) -> None:
            time.sleep(0.02)
            super().run()

    before, here, after = ([Brief(crowd, number) for _ in range(20)] for number in range(3))
    assert all(pair[0].admit(request) for request in before)
    assert all(pair[1].admit(request) for request in here)
    assert all(pair[0].admit(request) for request in after)
    until(lambda: all(request.ended.is_set() for request in (*before, *here, *after)))
    assert set(crowd.began[:18]) == {0} and set(crowd.began[22:38]) == {1} and set(crowd.began[42:]) == {2}


def test_the_more_urgent_request_goes_first_whichever_process_it_waits_in(
    pair: tuple[Admission, Admission],
) -> None:
    """A priority used to count only among requests to the same public model; the two took turns."""
    crowd = Crowd()
    _, gate = occupied(pair[0], crowd)
    requests = [ScriptedRequest(crowd, number) for number in range(12)]
    for number, (request, priority) in enumerate(zip(requests, (0, 5, -5, 0, 9, -5, -9, 3, 8, 0, -2, 5), strict=True)):
        request.priority, request.num_slots = priority, 3
        assert pair[number % 2].admit(request)
    gate.set()
    assert all(request.ended.wait(WAIT_S) for request in requests)
    assert crowd.began[3:] == sorted(range(12), key=lambda number: (requests[number].priority, number))


def test_the_more_urgent_request_of_a_tenant_at_its_limit_goes_first_whichever_process_it_waits_in(
    tmp_path: Path,
) -> None:
    pair = Admission(6, 300, tmp_path, TWO), Admission(6, 300, tmp_path, TWO)
    crowd, gate = Crowd(), threading.Event()
    assert pair[0].admit(first := ScriptedRequest(crowd, -1, gate=gate))
    requests = [ScriptedRequest(crowd, number) for number in range(6)]
    for number, (request, priority) in enumerate(zip(requests, (0, 5, -5, 9, 8, -2), strict=True)):
        request.priority, request.num_slots = priority, 2
        assert pair[number % 2].admit(request)
    assert crowd.began == [-1]
    gate.set()
    assert first.ended.wait(WAIT_S) and all(request.ended.wait(WAIT_S) for request in requests)
    assert crowd.began[1:] == sorted(range(6), key=lambda number: requests[number].priority)
    assert all(admission.close(WAIT_S) for admission in pair)


def test_a_request_that_is_refused_holds_up_nobody_in_the_other_process(tmp_path: Path) -> None:
    pair = Admission(1, 0, tmp_path), Admission(1, 0, tmp_path)
    crowd = Crowd()
    _, gate = occupied(pair[0], crowd)
    assert not pair[1].admit(ScriptedRequest(crowd))
    gate.set()
    until(lambda: pair[0].num_running == 0)
    assert pair[0].admit(ScriptedRequest(crowd)), "its turn is later than that of the refused one"
    assert all(admission.close(WAIT_S) for admission in pair)


def test_a_slot_that_another_process_frees_is_taken_without_a_poll(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_module, "POLL_S", 1e6)
    pair = Admission(1, 300, tmp_path), Admission(1, 300, tmp_path)
    crowd = Crowd()
    _, gate = occupied(pair[0], crowd)
    requests = [ScriptedRequest(crowd, number) for number in range(100)]
    assert all(pair[number % 2].admit(request) for number, request in enumerate(requests))
    gate.set()
    assert all(request.ended.wait(WAIT_S) for request in requests)
    assert crowd.began == [-1, *range(100)], "they run in the order of their arrival"
    assert all(admission.close(0.0) for admission in pair)


def test_shared_places_request_that_needs_several_is_not_starved_by_another_process(
    pair: tuple[Admission, Admission],
) -> None:
    crowd, gates = Crowd(), [threading.Event() for _ in range(3)]
    for gate in gates:
        assert pair[0].admit(ScriptedRequest(crowd, 0, gate=gate))
    wide = ScriptedRequest(crowd, 1)
    wide.num_slots = 3
    assert pair[1].admit(wide)
    gates[0].set()
    until(lambda: pair[0].num_running == 2)
    assert pair[0].admit(narrow := ScriptedRequest(crowd, 2)) and narrow.num_runs == 0, "it came after the wide one"
    for gate in gates[1:]:
        gate.set()
    assert wide.ended.wait(WAIT_S) and narrow.ended.wait(WAIT_S)
    assert crowd.began[-2:] == [1, 2]


def test_wide_request_of_a_tenant_at_its_limit_is_not_starved_by_its_narrow_ones_to_the_other_process(
    tmp_path: Path,
) -> None:
    pair = Admission(6, 300, tmp_path, TWO), Admission(6, 300, tmp_path, TWO)
    crowd, gates = Crowd(), [threading.Event() for _ in range(3)]
    assert all(pair[0].admit(ScriptedRequest(crowd, 0, gate=gate)) for gate in gates[:2])
    wide, narrow = ScriptedRequest(crowd, 1), ScriptedRequest(crowd, 2, gate=gates[2])
    wide.num_slots = 2
    assert pair[1].admit(wide)
    gates[0].set()
    until(lambda: pair[0].num_running == 1)
    assert pair[0].admit(narrow) and narrow.num_runs == 0, "it came after the wide one"
    for gate in gates[1:]:
        gate.set()
    assert wide.ended.wait(WAIT_S) and narrow.ended.wait(WAIT_S)
    assert crowd.began[-2:] == [1, 2]
    assert all(admission.close(WAIT_S) for admission in pair)


def test_the_turn_of_a_tenant_ends_with_its_request_that_was_given_up(tmp_path: Path) -> None:
    pair = Admission(6, 300, tmp_path, TWO), Admission(6, 300, tmp_path, TWO)
    crowd, gate = Crowd(), threading.Event()
    assert pair[0].admit(ScriptedRequest(crowd, 0, gate=gate))
    wide, narrow = ScriptedRequest(crowd, 1), ScriptedRequest(crowd, 2)
    wide.num_slots = 2
    assert pair[1].admit(wide) and pair[0].admit(narrow) and narrow.num_runs == 0
    wide.cancelled = True
    assert narrow.ended.wait(WAIT_S) and wide.reasons == ["cancelled"]
    gate.set()
    assert all(admission.close(WAIT_S) for admission in pair)


def test_shared_places_of_a_process_that_was_killed_are_free_again(tmp_path: Path) -> None:
    code = (
        "import pathlib, time\n"
        "from orchestrator.server.running_slots import SharedRunningSlots\n"
        "from orchestrator.server.tenants import TenantLimits\n"
        f"slots = SharedRunningSlots(pathlib.Path({str(tmp_path)!r}), 2, TenantLimits(tokens=3))\n"
        "print(slots.take(2, num_tokens=2).name, slots.take(1, 'x').name, slots.take(1).name, flush=True)\n"
        "time.sleep(60)\n"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert other.stdout and other.stdout.readline() == "TAKEN TOO_FEW TENANT_AT_LIMIT\n"
    slots = SharedRunningSlots(tmp_path, 2, TenantLimits(tokens=3))
    assert slots.take(1) is Taking.TENANT_AT_LIMIT and slots.take(1, "x") is Taking.TOO_FEW
    other.kill()
    other.communicate(timeout=WAIT_S)
    assert slots.take(2) is Taking.TAKEN and slots.take(1) is Taking.TOO_FEW
    slots.give_back(2)
    assert slots.take(1) is Taking.TAKEN
