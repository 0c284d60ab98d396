"""The life of a call in the client: it is answered once, by its deadline, whatever happens."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from orchestrator.core.context import Context
from orchestrator.core.errors import EngineError, EngineLost, ServingError, Unavailable, UnknownSequence
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import EngineSpeculation, StepOptions
from runtime.trtllm import in_flight
from runtime.trtllm.client import TrtllmClient
from tests.standin.engine_folder import make_engine
from tests.support.clients import until
from tests.support.engines import ask, submit
from tests.support.executor import (
    GREEDY,
    LIMIT_S,
    PROMPT,
    request,
    serving,
    standin,
)


def test_step_with_the_delta_of_an_unknown_sequence_is_refused(client: TrtllmClient[StepRequest]) -> None:
    context = Context(PROMPT)
    delta = delta_of(context, 4, 9, "")
    with pytest.raises(UnknownSequence):
        ask(client, StepRequest(delta, TokenTree.bare(), GREEDY, StepOptions(), 1000))


def test_deadline_cancels_the_request_and_answers_in_time(client: TrtllmClient[StepRequest]) -> None:
    standin(client).gate.clear()
    answers: SimpleQueue[Any] = SimpleQueue()
    began_s = time.monotonic()
    client.submit(request(PROMPT), began_s + 0.1, answers.put)
    answer = answers.get(timeout=LIMIT_S)
    assert isinstance(answer, Unavailable) and "deadline" in str(answer)
    assert time.monotonic() >= began_s + 0.1
    assert len(standin(client).cancelled) == 1
    standin(client).gate.set()
    assert ask(client, request(PROMPT)).path == ()
    assert answers.empty()


def test_release_cancels_the_call_under_way(client: TrtllmClient[StepRequest]) -> None:
    standin(client).gate.clear()
    answers = submit(client, request(PROMPT, sequence_id=4))
    client.release(4)
    assert str(answers.get(timeout=LIMIT_S)) == "the sequence was released"
    assert len(standin(client).cancelled) == 1
    assert client.status().num_sequences == 0


def test_second_call_of_a_sequence_is_refused_while_the_first_is_under_way(client: TrtllmClient[StepRequest]) -> None:
    standin(client).gate.clear()
    first = submit(client, request(PROMPT))
    assert "has a call under way" in str(submit(client, request(PROMPT)).get(timeout=LIMIT_S))
    standin(client).gate.set()
    assert not isinstance(first.get(timeout=LIMIT_S), ServingError)


def test_response_with_an_error_is_that_request_s_alone(client: TrtllmClient[StepRequest], greedy: list[int]) -> None:
    standin(client).gate.clear()
    standin(client).poison = 50
    poisoned = submit(client, request([50, 3], sequence_id=2))
    sound = submit(client, request(PROMPT, sequence_id=3))
    standin(client).gate.set()
    error = poisoned.get(timeout=LIMIT_S)
    assert type(error) is EngineError and str(error).startswith("TensorRT-LLM failed on this request: poisoned")
    assert sound.get(timeout=LIMIT_S).next_token == greedy[0]


def test_request_that_the_executor_refuses_is_an_error_of_its_own(
    client: TrtllmClient[StepRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standin(client).engine, "max_draft_len", 1)
    with pytest.raises(EngineError, match=r"failed on this request: .* Draft tokens length \(2\) exceeds maximum"):
        ask(client, request(PROMPT, [1, 2]))
    assert ask(client, request(PROMPT)).path == ()


def lie(client: TrtllmClient[StepRequest], output: list[int]) -> None:
    """Let the executor answer these tokens."""
    iterate = standin(client)._iterate

    def lying(active: Any) -> Any:
        response = iterate(active)
        response.result.output_token_ids[0] = list(output)
        return response

    standin(client)._iterate = lying


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ([], "ended the request without a token"),
        ([1, 2], "are not the 8"),
        (PROMPT, "are not the 8"),
        ([*PROMPT, 64], r"answered the token 64, outside of 0\.\.63"),
        ([*PROMPT, -1], "answered the token -1"),
        ([*PROMPT, 1, 2], "answered 2 new tokens, at most 1 were requested"),
    ],
)
def test_result_without_new_tokens_is_an_error(
    client: TrtllmClient[StepRequest], output: list[int], words: str
) -> None:
    lie(client, output)
    with pytest.raises(EngineError, match=words):
        ask(client, request(PROMPT))


@pytest.mark.parametrize(
    ("new", "path", "next_token"),
    [
        ([21, 22], (1,), 22),  # cut short: the last token is the new root, though it was drafted
        ([21, 22, 23], (1, 2), 23),
        ([21, 30, 31], (1,), 30),  # went on after the first difference: the rest is another step's
        ([30], (), 30),
    ],
)
def test_accepted_drafts_are_inferred_from_the_tokens(
    client: TrtllmClient[StepRequest], new: list[int], path: tuple[int, ...], next_token: int
) -> None:
    lie(client, PROMPT + new)
    answer = ask(client, request(PROMPT, [21, 22, 23]))
    assert (answer.path, answer.next_token) == (path, next_token)


def test_broken_executor_is_lost_and_says_so_once_all_are_answered(folder: Path) -> None:
    told: SimpleQueue[Any] = SimpleQueue()
    with serving(folder) as client:
        client.on_broken(lambda: told.put("broken"))
        standin(client).gate.clear()
        client.submit(request(PROMPT), time.monotonic() + LIMIT_S, told.put)
        standin(client).break_down()
        assert type(told.get(timeout=LIMIT_S)) is EngineLost
        assert told.get(timeout=LIMIT_S) == "broken"
        assert isinstance(submit(client, request(PROMPT)).get(timeout=LIMIT_S), EngineLost)
        client.on_broken(lambda: told.put("broken before"))
        assert told.get_nowait() == "broken before"


def test_executor_that_died_while_idle_is_lost_with_the_first_call(folder: Path) -> None:
    told: SimpleQueue[Any] = SimpleQueue()
    with serving(folder) as client:
        client.on_broken(lambda: told.put("broken"))
        standin(client).break_down()
        assert isinstance(submit(client, request(PROMPT)).get(timeout=LIMIT_S), EngineLost)
        assert told.get(timeout=LIMIT_S) == "broken"


def test_executor_that_answers_nothing_at_all_is_lost(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "SILENT_S", 0.2)
    told: SimpleQueue[Any] = SimpleQueue()
    with serving(folder) as client:
        client.on_broken(lambda: told.put("broken"))
        standin(client).gate.clear()
        for number in range(in_flight.SILENT_CALLS):
            assert told.empty()
            client.submit(request(PROMPT, sequence_id=number), time.monotonic() + 0.1, lambda _: None)
            until(lambda: not client._in_flight.num_running, "the deadline")
        assert told.get(timeout=LIMIT_S) == "broken"


def test_executor_that_answers_somebody_is_not_lost() -> None:
    silent = in_flight.Watchdog()
    silent.begin(0.0, is_idle=True)
    assert not silent.is_lost(50.0, 2)
    silent.end(100.0)
    assert not silent.is_lost(300.0, 2)
    assert not silent.is_lost(300.0, 0)
    silent.begin(300.0, is_idle=True)  # a call more ends no silence
    assert silent.is_lost(301.0, 1)
    fresh = in_flight.Watchdog()
    fresh.begin(1000.0, is_idle=True)
    assert not fresh.is_lost(1059.0, 9)  # several short deadlines, not yet a minute
    assert fresh.is_lost(1060.0, 1)


def test_response_that_cannot_be_read_is_that_request_s_alone(
    client: TrtllmClient[StepRequest], greedy: list[int]
) -> None:
    executor = standin(client)
    executor.gate.clear()
    iterate = executor._iterate

    def torn(active: Any) -> Any:
        response = iterate(active)
        if active.request.input_token_ids[0] == 50:
            response._result = None
        return response

    executor._iterate = torn
    broken = submit(client, request([50, 3], sequence_id=2))
    sound = submit(client, request(PROMPT, sequence_id=3))
    executor.gate.set()
    error = broken.get(timeout=LIMIT_S)
    assert type(error) is EngineError and "its response cannot be read: this response has no result" in str(error)
    assert sound.get(timeout=LIMIT_S).next_token == greedy[0]


def test_close_leaves_an_executor_behind_that_does_not_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.trtllm.client.SHUTDOWN_LIMIT_S", 0.2)
    held = threading.Event()
    with serving(folder) as client:
        shutdown = standin(client).shutdown
        standin(client).shutdown = lambda: held.wait() and shutdown()
        began_s = time.monotonic()
        client.close()
        assert time.monotonic() - began_s < LIMIT_S / 2
        held.set()


def test_close_answers_what_is_under_way(folder: Path) -> None:
    with serving(folder) as client:
        standin(client).gate.clear()
        answers = submit(client, request(PROMPT))
    assert str(answers.get(timeout=LIMIT_S)) == "the engine is shutting down"
    assert isinstance(submit(client, request(PROMPT)).get(timeout=LIMIT_S), Unavailable)


def test_calls_are_counted_under_the_lock_and_before_their_answers(
    folder: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: dict[int, int] = {}
    unlocked: list[int] = []

    def count(client: Any, number: int) -> None:
        if counts.get(id(client)) is not None and not client._changed._is_owned():
            unlocked.append(number)
        counts[id(client)] = number

    monkeypatch.setattr(TrtllmClient, "num_calls", property(lambda client: counts[id(client)], count), raising=False)
    medusa = make_engine(tmp_path / "medusa", checkpoint, mode="medusa")
    for engine, options in ((folder, StepOptions()), (medusa, StepOptions(engine_speculation=EngineSpeculation(32)))):
        with serving(engine) as client:
            context, seen = list(PROMPT), []
            for number in range(client.status().num_calls + 1, client.status().num_calls + 5):
                answers: SimpleQueue[Any] = SimpleQueue()
                step = request(context, options=options, prompt_len=len(PROMPT))
                client.submit(
                    step,
                    time.monotonic() + LIMIT_S,
                    lambda answer, client=client, answers=answers: answers.put((answer, client.status().num_calls)),
                )
                answer, num_calls = answers.get(timeout=LIMIT_S)
                context += answer.tokens(TokenTree.bare())
                seen.append(num_calls == number)
        assert seen == [True] * 4
    assert unlocked == []


def test_watch_reports_figures(client: TrtllmClient[StepRequest]) -> None:
    reports: SimpleQueue[Any] = SimpleQueue()
    client.watch(reports.put)
    assert client.preparation(request(PROMPT)) is None
    ask(client, request(PROMPT))
    assert reports.get(timeout=LIMIT_S).blocks_total == 0
