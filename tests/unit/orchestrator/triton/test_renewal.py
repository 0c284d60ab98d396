"""Renewal: a public model has its process replaced before lost calls hold all of Triton's threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import psutil
import pytest

from orchestrator.core.errors import Unavailable
from orchestrator.triton import renewal
from orchestrator.triton.renewal import Renewal
from tests.support.clients import until
from tests.support.without_triton import imported


class Process:
    """A process of a public model with 40 threads, of which each of 8 requests may need two."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit_s: float = 30.0) -> None:
        monkeypatch.setattr(renewal, "_POLL_S", 0.01)
        self.num_lost, self.num_running = 0, 3
        self.is_replaced = threading.Event()
        self.renewal = Renewal(
            40, lambda: self.num_lost, lambda: self.num_running, lambda: 8, self.is_replaced.set, limit_s
        )
        self.renewal.start()

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
    assert not process.is_replaced.wait(0.2)
    assert not process.refuses()


def test_a_process_with_too_few_threads_refuses_requests_and_is_replaced_behind_the_running_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = Process(monkeypatch)
    process.num_lost = 25
    until(process.refuses, "a refusal")
    assert not process.is_replaced.wait(0.2)
    process.num_running = 0
    assert process.is_replaced.wait(10)


def test_a_process_with_too_few_threads_is_replaced_though_a_request_does_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = Process(monkeypatch, limit_s=0.1)
    process.num_lost = 40
    assert process.is_replaced.wait(10)


def test_no_process_is_replaced_without_a_lost_call_however_few_threads_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(renewal, "_POLL_S", 0.01)
    is_replaced = threading.Event()
    Renewal(8, lambda: 0, lambda: 0, lambda: 256, is_replaced.set, 30.0).start()
    assert not is_replaced.wait(0.2)


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
