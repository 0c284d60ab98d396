"""The client of the target when calls fail: what it tries again, what it releases, and when it stops waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from orchestrator.core.context import Context
from orchestrator.core.drafting import Limits
from orchestrator.core.errors import (
    ClientDisconnected,
    EngineLost,
    RequestError,
    ServingError,
    Unavailable,
    UnknownSequence,
)
from orchestrator.core.messages.context import Release
from orchestrator.core.messages.run import RunOptions, TakeSteps
from orchestrator.core.proposal import Proposal, Step
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.types import Acceptance, StepOptions
from tests.support.without_triton import imported

RUN = RunOptions("none", "{}", Limits(8, 64, 4))
LIMIT_S = 10.0
STEPS = [Step(Proposal.empty(), Acceptance((), 5), 0.0, 0.0)]


@pytest.fixture
def clients() -> Iterator[ModuleType]:
    with imported("clients") as module:
        yield module


class Target:
    """Answers calls in turn with what it is given, and notes what each call was."""

    def __init__(self, clients: ModuleType, monkeypatch: pytest.MonkeyPatch, answers: list[Any]) -> None:
        self.calls: list[str] = []
        self._answers = iter(answers)
        monkeypatch.setattr(clients.pb, "call", self._call)

    def _call(
        self, model: str, call: Any, kind: Any, limit_s: float, is_unwanted: Callable[[], bool] = lambda: False
    ) -> Any:
        if isinstance(call, TakeSteps):
            self.calls.append("take")
        elif isinstance(call, Release):
            self.calls.append("release")
            return None
        else:
            self.calls.append("begin")
        answer = next(self._answers)
        if isinstance(answer, ServingError):
            raise answer
        return answer


def take(client: Any, context: Context) -> None:
    """Take steps and commit their tokens."""
    for step in client.take(context, Sampling(), StepOptions(), RUN):
        context.commit(step.tokens)


def client_of(clients: ModuleType, **options: Any) -> Any:
    return clients.BlsTargetClient("", time.monotonic() + LIMIT_S, **options)


@pytest.mark.parametrize("error", [RequestError("too large"), Unavailable("not now")])
def test_a_sequence_whose_first_step_is_refused_is_released(
    clients: ModuleType, monkeypatch: pytest.MonkeyPatch, error: ServingError
) -> None:
    target, client = Target(clients, monkeypatch, [error]), client_of(clients)
    with pytest.raises(type(error)):
        take(client, Context([1, 2]))
    client.release()
    assert target.calls == ["begin", "release"]


def test_a_target_that_was_lost_or_never_called_is_sent_no_release(
    clients: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "LOST_LIMIT_S", 0.0)
    target, client = Target(clients, monkeypatch, [EngineLost("hung")]), client_of(clients)
    client.release()
    with pytest.raises(EngineLost):
        take(client, Context([1, 2]))
    client.release()
    assert target.calls == ["begin"]


def test_a_run_that_has_ended_with_unavailable_is_begun_anew(
    clients: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine forgets a run that answers an error, so that the next call for its steps finds none."""
    answers = [STEPS, Unavailable("no blocks"), UnknownSequence("a run of sequence 1"), STEPS]
    target, client, context = Target(clients, monkeypatch, answers), client_of(clients), Context([1, 2])
    take(client, context)
    take(client, context)
    assert target.calls == ["begin", "take", "take", "begin"] and context.output == [5, 5]


@pytest.mark.parametrize("error", [EngineLost("restarting"), Unavailable("no blocks")])
def test_nothing_is_tried_again_for_a_client_that_has_gone_and_the_sequence_is_released(
    clients: ModuleType, monkeypatch: pytest.MonkeyPatch, error: ServingError
) -> None:
    has_gone = iter([False, False])
    target = Target(clients, monkeypatch, [STEPS, error])
    client, context = client_of(clients, is_unwanted=lambda: next(has_gone, True)), Context([1, 2])
    take(client, context)
    with pytest.raises(ClientDisconnected):
        take(client, context)
    client.release()
    assert target.calls == ["begin", "take", *([] if isinstance(error, EngineLost) else ["release"])]


def test_a_call_that_waits_is_left_when_the_client_goes(clients: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    let_go, began_s = threading.Event(), time.monotonic()
    monkeypatch.setattr(clients.pb, "lost_check", lambda model: lambda: False)
    monkeypatch.setattr(clients.pb, "execute", lambda model, call, kind: let_go.wait(LIMIT_S))
    client = client_of(clients, is_unwanted=lambda: time.monotonic() - began_s > 0.1)
    with pytest.raises(ClientDisconnected):
        take(client, Context([1, 2]))
    assert time.monotonic() - began_s < LIMIT_S / 2
    let_go.set()
