"""Drafters in the target's process: runs draft with them, and their failures cost drafts, never text."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from orchestrator.core.context import Context
from orchestrator.core.errors import EngineError, Unavailable, UnknownSequence
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.drafter import DraftRequest
from orchestrator.core.proposal import Budget
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import DraftResponse
from orchestrator.drafting.dependencies import NO_ANSWER
from orchestrator.drafting.drafter_clients import LocalDrafterClient
from runtime.engine.calls import EngineCall
from runtime.engine.kv.blocks import BlockPool
from runtime.engine.kv.sequences import SequenceTable
from runtime.engine.local_drafter import LocalDrafter
from tests.support.engines import LIMIT_S

Calls = list[EngineCall[DraftRequest]]


class Scripted:
    """An engine whose passes do what they are told; by default each answers all calls with a chain of one token."""

    kernels = "script"

    def __init__(self) -> None:
        self.sequences = SequenceTable(BlockPool(4, 4), 64)
        self.passes: list[int] = []
        self.script: Any = None

    def preparation(self, request: DraftRequest) -> None:
        return None

    def advance(self, calls: Calls) -> Calls:
        self.passes.append(len(calls))
        if self.script and (left := self.script(calls)) is not None:
            return list(left)
        for call in calls:
            call.reply(DraftResponse(TokenTree.chain([7])))
        return []


def request(sequence_id: int = 1, deadline_ms: int = int(1000 * LIMIT_S)) -> DraftRequest:
    return DraftRequest(delta_of(Context([1, 2, 3]), 0, sequence_id, ""), Sampling(), 4, 4, deadline_ms=deadline_ms)


def client_of(drafter: LocalDrafter) -> LocalDrafterClient:
    return LocalDrafterClient("draft", drafter, "", LIMIT_S)


def propose(client: LocalDrafterClient, context: Context) -> DraftResponse:
    return client.propose(context, Sampling(), Budget(4, 4))


def test_calls_that_wait_while_a_pass_runs_share_the_next_one() -> None:
    engine, begun, go_on = Scripted(), threading.Event(), threading.Event()

    def hold(calls: Calls) -> None:
        begun.set()
        assert len(engine.passes) > 1 or go_on.wait(LIMIT_S)

    engine.script = hold
    drafter, answers = LocalDrafter(engine), list[DraftResponse]()
    threads = [
        threading.Thread(target=lambda number=number: answers.append(drafter.draft(request(number))), daemon=True)
        for number in range(1, 5)
    ]
    threads[0].start()
    assert begun.wait(LIMIT_S)
    for thread in threads[1:]:
        thread.start()
    while drafter._inbox.qsize() < 3:
        assert threads[0].is_alive()
    go_on.set()
    for thread in threads:
        thread.join(LIMIT_S)

    assert len(answers) == 4
    assert engine.passes == [1, 3]


def test_a_call_whose_time_is_over_is_refused_and_the_drafter_goes_on() -> None:
    engine = Scripted()
    drafter = LocalDrafter(engine)

    with pytest.raises(Unavailable, match="deadline"):
        drafter.draft(request(deadline_ms=0))
    assert engine.passes == []
    assert drafter.draft(request()).tree.num_nodes == 1
    assert (drafter.counts.num_calls, drafter.counts.num_late) == (2, 1)


def test_only_the_call_at_fault_is_refused() -> None:
    engine = Scripted()

    def fail(calls: Calls) -> None:
        if any(call.sequence_id == 2 for call in calls):
            raise ZeroDivisionError

    engine.script = fail
    drafter = LocalDrafter(engine)
    with pytest.raises(EngineError, match="the engine failed on this request"):
        drafter.draft(request(2))
    assert drafter.draft(request(1)).tree.num_nodes == 1
    assert drafter.counts.num_failed == 1


@pytest.mark.parametrize("error", [EngineError("broken"), Unavailable("the pool is full")])
def test_a_client_goes_on_without_a_draft_and_pauses(error: Exception) -> None:
    engine = Scripted()
    client, context = client_of(LocalDrafter(engine)), Context([1, 2, 3])

    def refuse(calls: Calls) -> None:
        for call in calls:
            call.reply(error)  # type: ignore[arg-type]

    engine.script = lambda calls: refuse(calls) or []
    assert propose(client, context) is NO_ANSWER
    assert propose(client, context) is NO_ANSWER
    assert engine.passes == [1], "it pauses"
    assert not client.has_given_up


def test_a_client_sends_what_is_new_and_all_of_it_to_a_drafter_that_lost_the_sequence() -> None:
    engine, sent = Scripted(), list[list[int]]()

    def keep(calls: Calls) -> list[Any] | None:
        sent.append(calls[0].delta.context_ids.tolist())
        if len(sent) != 2:
            return None
        calls[0].reply(UnknownSequence("gone"))
        return []

    engine.script = keep
    client, context = client_of(LocalDrafter(engine)), Context([1, 2, 3])
    propose(client, context)
    context.commit([7, 8])
    assert propose(client, context).tree.tokens.tolist() == [7]
    assert sent == [[1, 2, 3], [7, 8], [1, 2, 3, 7, 8]]


def test_a_release_does_not_wait_for_a_pass_and_is_made_before_the_next_one() -> None:
    engine, begun, go_on, dropped = Scripted(), threading.Event(), threading.Event(), list[int]()

    def hold(calls: Calls) -> None:
        begun.set()
        assert go_on.wait(LIMIT_S)

    engine.script, engine.sequences.drop = hold, dropped.append  # type: ignore[method-assign]
    drafter = LocalDrafter(engine)
    thread = threading.Thread(target=lambda: drafter.draft(request()), daemon=True)
    thread.start()
    assert begun.wait(LIMIT_S)
    releasing = threading.Thread(target=lambda: drafter.release(5), daemon=True)
    releasing.start()
    releasing.join(2.0)
    assert not releasing.is_alive() and dropped == []
    go_on.set()
    thread.join(LIMIT_S)
    drafter.draft(request(2))
    assert dropped == [5]
