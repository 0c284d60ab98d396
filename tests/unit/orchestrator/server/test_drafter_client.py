"""A request's line to a drafter: whose fault a silence is, and what that costs the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from orchestrator.core.context import Context
from orchestrator.core.errors import EngineError, RequestError, Unavailable, UnknownSequence
from orchestrator.core.messages.drafter import DraftRequest
from orchestrator.core.proposal import Budget
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import DraftResponse
from orchestrator.drafting import drafter_clients
from orchestrator.drafting.dependencies import NO_ANSWER
from orchestrator.server.breaker import Breaker
from tests.support.clients import until
from tests.support.hanging import WAIT_S, Hang
from tests.support.without_triton import imported

ANSWER = DraftResponse(TokenTree.chain([7]), (), 3)


@pytest.fixture(scope="module")
def bls() -> Iterator[ModuleType]:
    with imported("clients") as module:
        yield module


class Drafter:
    """Answers with what it is told, by turns, and keeps what it was sent."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.sent: list[DraftRequest] = []

    def __call__(self, model: str, call: DraftRequest, kind: Any) -> Any:
        self.sent.append(call)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def line(bls: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(*answers: Any) -> tuple[Any, Drafter, Breaker[Any]]:
        drafter, breaker = Drafter(*answers), Breaker[Any]("eagle", 4, timeout_s=0.25 * 40)
        monkeypatch.setattr(bls.pb, "execute", drafter)
        return bls.BlsDrafterClient("eagle", breaker, 50, ""), drafter, breaker

    return make


def propose(line: Any, context: Context) -> Any:
    return line.propose(context, Sampling(), Budget(4, 4))


def test_a_drafter_that_cannot_serve_a_request_is_not_asked_again_by_it(line: Any) -> None:
    asked, drafter, breaker = line(RequestError("needs 9 blocks, the pool has 4"))
    assert not asked.has_given_up
    for _ in range(3):
        assert propose(asked, Context([1, 2, 3])) is NO_ANSWER
    assert asked.has_given_up and len(drafter.sent) == 1
    assert (breaker.counts.num_failed, breaker.is_open) == (0, False), "others are served"


def test_a_drafter_without_room_is_asked_again_behind_a_pause(
    line: Any, bls: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter_clients, "PAUSE_OF_LIMIT", 0.002)  # 20 ms
    asked, drafter, breaker = line(Unavailable("KV pool full"), ANSWER)
    assert propose(asked, Context([1, 2, 3])) is NO_ANSWER
    assert propose(asked, Context([1, 2, 3])) is NO_ANSWER
    assert len(drafter.sent) == 1
    assert (breaker.counts.num_failed, breaker.is_open, asked.has_given_up) == (0, False, False)
    until(lambda: not asked._pause.is_on, "the end of the pause")
    assert propose(asked, Context([1, 2, 3])).tree.tokens.tolist() == [7]


def test_a_drafter_that_is_always_late_costs_few_steps_their_wait(
    bls: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of a millisecond beside a drafter that needs 30 where 10 are allowed; one call in two would be 48 here."""
    monkeypatch.setattr(bls.pb, "execute", lambda *_: time.sleep(0.03) or ANSWER)
    asked = bls.BlsDrafterClient("eagle", Breaker[Any]("eagle", 4, timeout_s=0.01), 50, "")
    for _ in range(96):
        assert propose(asked, Context([1, 2, 3])) is NO_ANSWER
        time.sleep(0.001)
    assert 1 <= asked._breaker.counts.num_late <= 5


def test_only_a_draft_ends_the_pauses_not_an_answer_that_costs_nothing(
    line: Any, bls: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that comes back from a pause asks for what it lacks, or has lost the sequence."""
    monkeypatch.setattr(drafter_clients, "PAUSE_OF_LIMIT", 0.001)  # 10 ms
    full, bare = (
        Unavailable("KV pool full"),
        ANSWER._replace(tree=TokenTree.bare()),
    )
    asked, _, _ = line(ANSWER, full, UnknownSequence("gone"), bare, full, ANSWER)
    context, pauses = Context([1, 2, 3]), []
    for _ in range(5):
        until(lambda: not asked._pause.is_on, "the end of the pause")
        propose(asked, context)
        pauses.append(asked._pause._pause_s)
    assert pauses == pytest.approx([0.0, 0.01, 0.01, 0.02, 0.0])


def test_a_drafter_that_fails_is_left_alone_for_a_while(line: Any) -> None:
    asked, drafter, breaker = line(EngineError("broken"))
    assert propose(asked, Context([1, 2, 3])) is NO_ANSWER
    assert (breaker.counts.num_failed, breaker.is_open) == (1, True)
    assert propose(asked, Context([1, 2, 3])) is NO_ANSWER
    assert len(drafter.sent) == 1


def test_a_drafter_that_lost_the_sequence_is_sent_it_whole(line: Any) -> None:
    asked, drafter, _ = line(ANSWER, UnknownSequence("gone"), ANSWER)
    context = Context([1, 2, 3])
    propose(asked, context)
    context.commit([7, 8])
    assert propose(asked, context).tree.tokens.tolist() == [7]
    assert [call.delta.context_ids.tolist() for call in drafter.sent] == [[1, 2, 3], [7, 8], [1, 2, 3, 7, 8]]


def test_a_drafter_is_told_until_when_its_answer_is_of_use(line: Any) -> None:
    asked, drafter, _ = line(ANSWER)
    propose(asked, Context([1, 2, 3]))
    assert drafter.sent[0].deadline_ms == 10_000


def test_a_drafter_that_died_during_a_call_drafts_for_the_same_request_once_it_is_back(
    bls: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton never answers the call that the dead process had taken."""
    hang, has_died = Hang(ANSWER), threading.Event()
    monkeypatch.setattr(bls.pb, "lost_check", lambda model: has_died.is_set)
    monkeypatch.setattr(bls.pb, "execute", hang)
    monkeypatch.setattr(drafter_clients, "PAUSE_OF_LIMIT", 0.001)
    client = bls.BlsDrafterClient("eagle", Breaker[Any]("eagle", 4, timeout_s=0.05, cool_down_s=0.05), 50, "")
    assert propose(client, Context([1, 2, 3])) is NO_ANSWER
    has_died.set()
    monkeypatch.setattr(bls.pb, "execute", lambda *_: ANSWER)
    until(lambda: propose(client, Context([1, 2, 3])).tree.num_nodes, "a draft")
    assert not hang.ended.is_set()
    hang.let_go.set()


def test_closing_a_request_does_not_wait_for_its_drafter(line: Any, bls: ModuleType, monkeypatch: Any) -> None:
    client, _, _ = line(ANSWER)
    propose(client, Context([1, 2, 3]))
    hang = Hang({})
    monkeypatch.setattr(bls.pb, "execute", hang)
    client.close()
    assert hang.begun.wait(WAIT_S) and not hang.ended.is_set()
    hang.let_go.set()
