"""Renewal: a public model has its process replaced before lost calls hold all of Triton's threads."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import psutil
import pytest

from orchestrator.core.errors import Unavailable
from orchestrator.server import renewal
from orchestrator.server.renewal import Load, Renewal
from tests.support.clients import until
from tests.support.without_triton import imported


class Process:
    """A process of a public model with 40 threads, of which 8 requests may run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(renewal, "_POLL_S", 0.01)
        self.num_lost, self.num_requests, self.latest_deadline_s = 0, 0, math.inf
        self.asked, self.error = threading.Event(), False
        self.renewal = Renewal(40, self.load, self.ask)
        self.renewal.start()

    def load(self) -> Load:
        if self.error:
            raise OSError("no descriptor")
        return Load(
            num_lost=self.num_lost,
            num_requests=self.num_requests,
            max_running=8,
            latest_deadline_s=self.latest_deadline_s,
        )

    def ask(self) -> None:
        if self.error:
            raise OSError("no space")
        self.asked.set()

    def refuses(self) -> bool:
        """Return whether it refuses a request."""
        try:
            self.renewal.check()
        except Unavailable:
            return True
        return False


def test_a_process_with_threads_enough_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    process.num_lost = 24
    assert not process.asked.wait(0.3)
    assert not process.refuses()


def test_a_worn_process_is_replaced_when_it_is_idle_and_takes_requests_until_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = Process(monkeypatch)
    process.num_lost, process.num_requests = 25, 3
    assert not process.asked.wait(0.3)
    assert not process.refuses()
    process.num_requests = 0
    assert process.asked.wait(10)
    assert process.refuses()


def test_a_process_with_very_few_threads_refuses_requests_and_is_replaced_behind_those_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = Process(monkeypatch)
    process.num_lost, process.num_requests = 29, 3
    until(process.refuses, "a refusal")
    assert not process.asked.wait(0.3)
    process.num_requests = 0
    assert process.asked.wait(10)


def test_a_process_with_very_few_threads_is_replaced_when_all_its_requests_are_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = Process(monkeypatch)
    process.num_lost, process.num_requests = 40, 3
    process.latest_deadline_s = time.monotonic() + 0.1
    assert process.asked.wait(10)


def test_calls_that_seem_lost_for_a_moment_replace_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    for _ in range(20):
        process.num_lost = 40
        time.sleep(0.015)
        process.num_lost = 0
        time.sleep(0.03)
    assert not process.asked.is_set()


def test_no_process_is_replaced_without_a_lost_call_however_few_threads_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(renewal, "_POLL_S", 0.01)
    asked = threading.Event()
    load = Load(num_lost=0, num_requests=0, max_running=256, latest_deadline_s=0.0)
    Renewal(8, lambda: load, asked.set).start()
    assert not asked.wait(0.3)


def test_a_lack_of_descriptors_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    process.error = True
    time.sleep(0.1)
    process.error, process.num_lost = False, 40
    assert process.asked.wait(10)


def test_a_process_that_is_not_replaced_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewal, "ASK_AGAIN_S", 0.05)
    process = Process(monkeypatch)
    process.num_lost = 40
    for _ in range(3):
        assert process.asked.wait(10)
        process.asked.clear()


class Stub:
    """A process of a model, as psutil shows it."""

    def __init__(self) -> None:
        self.is_dead = False

    def is_running(self) -> bool:
        return not self.is_dead

    def status(self) -> str:
        return str(psutil.STATUS_RUNNING)


def calling(pb: ModuleType, monkeypatch: pytest.MonkeyPatch, process: Stub) -> Callable[[], None]:
    """Begin a call that a process takes; return what lets it be answered."""
    has_begun, may_end = threading.Event(), threading.Event()

    def exec_() -> SimpleNamespace:
        has_begun.set()
        assert may_end.wait(30)
        return SimpleNamespace()

    request = SimpleNamespace(exec=exec_)
    monkeypatch.setattr(pb.pb_utils, "InferenceRequest", lambda **_: request, raising=False)
    monkeypatch.setattr(pb.pb_utils, "TritonModelException", RuntimeError, raising=False)
    monkeypatch.setattr(pb, "_STUBS", SimpleNamespace(process_of=lambda model: process))
    thread = threading.Thread(target=pb._execute, args=("target", {}, ()))
    thread.start()
    assert has_begun.wait(30)

    def answer() -> None:
        may_end.set()
        thread.join(30)

    return answer


def test_a_call_is_lost_when_the_process_that_took_it_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub()
    with imported("pb") as pb:
        answer = calling(pb, monkeypatch, stub)
        assert pb.num_lost_calls() == 0
        stub.is_dead = True
        assert pb.num_lost_calls() == 1
        answer()
        assert pb.num_lost_calls() == 0
