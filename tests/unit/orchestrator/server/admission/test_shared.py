"""Two processes of a deployment that share its slots, each with a queue of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.server.admission import Admission
from tests.support.admission import Crowd, ScriptedRequest, occupied
from tests.support.hanging import WAIT_S, until


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Admission, Admission]]:
    made = Admission(3, 300, tmp_path), Admission(3, 300, tmp_path)
    yield made
    for admission in made:
        assert admission.close(WAIT_S)


def test_the_limit_holds_for_both_together(pair: tuple[Admission, Admission]) -> None:
    crowd = Crowd()
    requests = [ScriptedRequest(crowd, number) for number in range(40)]
    assert all(pair[number % 2].admit(request) for number, request in enumerate(requests))
    until(lambda: all(request.ended.is_set() for request in requests))
    assert crowd.most_running <= 3 and [request.num_runs for request in requests] == [1] * 40


def test_a_slot_that_the_other_frees_is_noticed(pair: tuple[Admission, Admission]) -> None:
    crowd = Crowd()
    _, gate = occupied(pair[0], crowd)
    assert pair[1].admit(waiting := ScriptedRequest(crowd))
    assert (pair[1].num_running, pair[1].num_waiting) == (0, 1)
    gate.set()
    assert waiting.ended.wait(WAIT_S)


def test_neither_is_starved_while_both_have_requests_waiting(pair: tuple[Admission, Admission]) -> None:
    """A process that frees a slot does not always take it again itself."""
    crowd = Crowd()

    class Brief(ScriptedRequest):
        def run(self) -> None:
            time.sleep(0.02)
            super().run()

    before, here, after = ([Brief(crowd, number) for _ in range(12)] for number in range(3))
    assert all(pair[0].admit(request) for request in before)
    assert all(pair[1].admit(request) for request in here)
    assert all(pair[0].admit(request) for request in after)
    until(lambda: all(request.ended.is_set() for request in (*before, *here, *after)))
    assert crowd.began.index(1) < crowd.began.index(2)
