"""The soak under faults at CI size: one process of each kind is lost while requests of all kinds come in.

The full size: `python -m tests.soak_under_faults` (make soak).
"""

from __future__ import annotations

import pytest

from tests.soak_under_faults import GATEWAY, KINDS, RELOAD, End, Result, deployment, run

pytestmark = [pytest.mark.server, pytest.mark.long]

#: Begins with the second replica, so that no two faults in a row hit the same one.
HURTS = (
    (1, "speculative", "kill"),
    (0, "launcher", RELOAD),
    (0, "target", "stop"),
    (1, "launcher", RELOAD),
    (1, "speculative_unary", "kill"),
    (-1, GATEWAY, "kill"),
    (-1, GATEWAY, "stop"),
    (0, "tritonserver", "kill"),
)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    ends: list[End] = []
    with deployment(tmp_path_factory.mktemp("chaos"), ends) as (servers, *gateways):
        return run(servers, *gateways, ends, lambda: HURTS, pause_s=2.0)


def test_no_text_is_wrong_and_no_request_is_lost(result: Result) -> None:
    print(result.page())

    assert not result.faults(), result.faults()[:3]
    assert result.readers.outcomes.keys() == {"equal"}


def test_every_kind_of_process_was_lost_under_every_kind_of_request(result: Result) -> None:
    assert {fault.kind for fault in result.chaos.faults} == {*KINDS, GATEWAY}
    assert result.num_moved > 0
    assert {visit.outcome for visit in result.visitors.visits} >= {"text", "beginning", "refused"}


def test_a_call_through_a_gateway_that_is_lost_fails_soon_and_the_next_one_is_served(result: Result) -> None:
    assert result.chaos.gateway.num_starts >= 3
    assert result.callers.outcomes()["text"] > 0 and result.callers.outcomes().keys() > {"text"}


def test_both_replicas_reloaded_under_requests(result: Result) -> None:
    assert [(reload.replica, reload.status) for reload in result.chaos.reloads] == [(0, 200), (1, 200)]
    assert all("draft" in reload.said and "max_running 16 -> 12" in reload.said for reload in result.chaos.reloads)
