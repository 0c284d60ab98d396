"""The stand-in of Kubernetes in the soak: a gateway that is lost comes back, and a call tells what became of it."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.soak_under_faults import GATEWAY, Chaos, Fault, Result
from tests.support import supervised_gateway as module
from tests.support.clients import until
from tests.support.supervised_gateway import Answer, Call, Callers, SupervisedGateway

TOKENIZER = Path(__file__).resolve().parents[3] / "models/target"
NOBODY: Any = None
LOST = Fault(GATEWAY, "kill", -1, 10.0, 5.0)


@dataclass(frozen=True)
class Asked:
    text: str = "abc"

    def fields(self) -> dict[str, Any]:
        return {"model": "target", "prompt": "a", "extra_body": {}}


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGSTOP])
def test_a_gateway_that_was_killed_or_stopped_is_started_again(
    monkeypatch: pytest.MonkeyPatch, way: signal.Signals
) -> None:
    monkeypatch.setattr(module, "PROBE_INTERVAL_S", 0.05)
    monkeypatch.setattr(module, "PROBE_LIMIT_S", 1.0)
    with SupervisedGateway("127.0.0.1:1", TOKENIZER, recovery_limit_s=1) as gateway:
        until(lambda: not gateway.is_starting, "the first probe")
        victim = gateway.pid
        os.kill(victim, way)
        until(lambda: gateway.pid != victim and gateway.is_live(), "another gateway")
        assert not gateway.serves(), "it has no replica"
        with pytest.raises(ProcessLookupError):
            os.kill(victim, 0)


def test_a_wrong_text_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([Answer("text", "abc"), Answer("cut", "ab"), Answer("cut", "b"), Answer("text", "ab")])
    monkeypatch.setattr(module, "_ask", lambda url, fields: next(answers, Answer("unanswered")))
    callers = Callers("", [Asked()], 1, pause_s=0.001)
    callers.start()
    until(lambda: len(callers.calls) > 4, "calls", 5.0)
    callers.stop()
    wrong = [fault.partition(", wanted")[0] for fault in callers.faults[:3]]
    assert [name in fault for name, fault in zip(("'b'", "'ab'", "unanswered"), wrong, strict=True)] == [True] * 3


def test_a_call_to_a_gateway_that_is_not_there_is_refused_and_no_fault_of_the_client() -> None:
    callers = Callers("http://127.0.0.1:1", [Asked()], 1)
    callers.start()
    until(lambda: callers.calls, "a call", 5.0)
    callers.stop()
    assert callers.outcomes().keys() == {"refused"} and not callers.faults


@pytest.mark.parametrize(
    ("status", "body", "outcome", "text"),
    [
        (200, 'data: {"choices": [{"text": "ab"}]}\n\ndata: [DONE]\n\n', "text", "ab"),
        (200, 'data: {"choices": [{"text": "ab"}]}\n\n', "cut", "ab"),
        (200, 'data: {"choices": [{"text": "ab"}]}\n\ndata: {"error": {}}\n\ndata: [DONE]\n\n', "error", "ab"),
        (503, '{"error": {}}', "error", ""),
    ],
)
def test_a_stream_has_its_text_or_not(status: int, body: str, outcome: str, text: str) -> None:
    answer = Answer()
    answer.read(httpx.Response(status, text=body), is_stream=True)
    assert (answer.outcome, answer.text) == (outcome, text)


@pytest.mark.parametrize(
    ("call", "is_odd"),
    [
        (Call("text", 0.0, 1.0), False),
        (Call("cut", 9.0, 10.5), False),
        (Call("refused", 14.0, 14.1), False),
        (Call("cut", 8.0, 9.0), True),
        (Call("error", 16.0, 17.0), True),
    ],
)
def test_a_call_may_fail_only_while_its_gateway_is_lost(call: Call, is_odd: bool) -> None:
    chaos = Chaos([], NOBODY, [], [LOST])
    callers = Callers("", [Asked()], 0, calls=[call])
    assert Result(1.0, NOBODY, callers, NOBODY, chaos, [], 0.0, 0.0, 0)._is_odd_call(call) is is_odd
