"""What a refused request is told: whom the refusal concerns, and when to come back."""

from __future__ import annotations

import time

import pytest

from gateway.triton import ReplicaFull
from orchestrator.core.deployment.config import ServingConfig
from orchestrator.core.errors import public_text
from orchestrator.server import admission as module
from orchestrator.server.admission import ServiceRate, queue_full


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


def test_a_refusal_tells_whether_another_salt_may_have_room() -> None:
    config = ServingConfig(target="t", max_running=2, max_waiting=3)
    assert public_text(queue_full(config, 4)) == (
        "full: 2 requests run and 3 wait; try again in 4 s (max_running, max_waiting in the deployment file)"
    )
    shared = queue_full(config.model_copy(update={"max_running_per_salt": 1}), 4)
    assert public_text(shared).startswith("full_for_salt: ")
    assert ReplicaFull(str(shared)).retry_after_s == 4
    assert public_text(queue_full(config.model_copy(update={"max_running_tokens_per_salt": 9}), 4)) == (
        "full_for_salt: 2 requests run and 3 wait; try again in 4 s "
        "(max_running, max_waiting, max_running_tokens_per_salt in the deployment file)"
    )
