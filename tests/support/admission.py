"""Requests for admission that run until a gate opens, and a count of those that run at once."""

from __future__ import annotations

import threading

from orchestrator.server.admission import Admission
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

    num_slots, num_tokens, priority, tenant, request_id = 1, 1, 0, "", ""

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


def occupied(admission: Admission, crowd: Crowd) -> tuple[list[ScriptedRequest], threading.Event]:
    """Fill every place with a request that waits for the gate."""
    gate = threading.Event()
    requests = [ScriptedRequest(crowd, -1, gate=gate) for _ in range(admission.max_running)]
    assert all(admission.admit(request) for request in requests)
    until(lambda: crowd.num_running == admission.max_running)
    return requests, gate
