"""Priorities, and tenants that no other can crowd out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from orchestrator.core.deployment.slots import TenantLimits
from orchestrator.server import admission as module
from orchestrator.server.admission import Admission
from tests.support.admission import Crowd, ScriptedRequest, occupied
from tests.support.hanging import WAIT_S, until


def request_of(
    crowd: Crowd, number: int, priority: int = 0, tenant: str = "", gate: threading.Event | None = None
) -> ScriptedRequest:
    request = ScriptedRequest(crowd, number, gate=gate)
    request.priority, request.tenant = priority, tenant
    return request


def test_the_more_urgent_request_goes_first_and_equals_in_the_order_of_their_arrival(
    make: Callable[..., Admission],
) -> None:
    admission, crowd = make(1, 10), Crowd()
    _, gate = occupied(admission, crowd)
    requests = [request_of(crowd, number, priority) for number, priority in enumerate((0, 5, -5, 0, -5, 5))]
    assert all(admission.admit(request) for request in requests)
    gate.set()
    for request in requests:
        assert request.ended.wait(WAIT_S)
    assert crowd.began == [-1, 2, 4, 0, 3, 1, 5]


def test_a_request_that_has_waited_long_goes_before_one_that_is_more_urgent(
    make: Callable[..., Admission], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AGING_S", 0.02)
    admission, crowd = make(1, 10), Crowd()
    _, gate = occupied(admission, crowd)
    old, urgent, most_urgent = request_of(crowd, 0), request_of(crowd, 1, -2), request_of(crowd, 2, -10)
    assert admission.admit(old)
    time.sleep(0.06)
    assert admission.admit(urgent) and admission.admit(most_urgent)
    gate.set()
    for request in (old, urgent, most_urgent):
        assert request.ended.wait(WAIT_S)
    assert crowd.began == [-1, 2, 0, 1]


def test_an_urgent_request_takes_the_place_of_the_last_in_a_full_queue(make: Callable[..., Admission]) -> None:
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


@pytest.fixture
def fair(make: Callable[..., Admission]) -> Admission:
    """Four slots, two at most of a tenant."""
    return make(4, 4, TenantLimits(slots=2))


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
    wide.num_slots = 2
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


@pytest.fixture
def frugal(make: Callable[..., Admission]) -> Admission:
    """Four slots, a hundred tokens at most of a tenant."""
    return make(4, 4, TenantLimits(tokens=100))


def test_a_tenant_whose_requests_come_to_too_many_tokens_waits_and_the_others_pass_it(frugal: Admission) -> None:
    crowd, gate = Crowd(), threading.Event()
    first, second, third = (request_of(crowd, number, tenant="greedy", gate=gate) for number in range(3))
    first.num_tokens, second.num_tokens, third.num_tokens = 60, 40, 1
    rest = [request_of(crowd, 3 + number, tenant="greedy") for number in range(3)]
    other = request_of(crowd, 9, tenant="modest", gate=gate)
    other.num_slots, other.num_tokens = 2, 50
    assert all(frugal.admit(request) for request in (first, second, third, other))
    until(lambda: crowd.num_running == 3)
    assert (third.num_runs, other.num_runs) == (0, 1)
    assert all(frugal.admit(request) for request in rest)
    assert frugal.num_waiting == 4 and not frugal.would_refuse(), "it depends on whose request comes"
    gate.set()
    assert all(request.ended.wait(WAIT_S) for request in (first, second, third, other, *rest))


def test_a_request_of_more_tokens_than_a_tenant_may_have_runs_when_no_other_of_its_tenant_does(
    frugal: Admission,
) -> None:
    crowd, gates = Crowd(), [threading.Event(), threading.Event()]
    small = request_of(crowd, 0, tenant="greedy", gate=gates[0])
    large = request_of(crowd, 1, tenant="greedy", gate=gates[1])
    late = request_of(crowd, 2, tenant="greedy")
    large.num_slots, large.num_tokens = 2, 1000
    assert all(frugal.admit(request) for request in (small, large, late))
    assert (large.num_runs, late.num_runs) == (0, 0)
    gates[0].set()
    until(lambda: large.num_runs == 1)
    assert late.num_runs == 0
    gates[1].set()
    assert large.ended.wait(WAIT_S) and late.ended.wait(WAIT_S)
