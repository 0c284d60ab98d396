"""Cancellation, deadlines, the queue and errors, over a target whose steps the tests release one by one."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from launcher.server import Server
from tests.server.conftest import deployment, link, repository, serving
from tests.support.clients import (
    Answer,
    EventStream,
    Stream,
    ask,
    ask_unary,
    generate,
    generate_stream,
    infer,
    infer_request,
    listed,
    until,
)
from tests.support.scripted_target import PROMPT, Script, text_at

pytestmark = pytest.mark.server

MAX_RUNNING, MAX_WAITING = 2, 3
#: How long the server may take to notice a closed connection; no test fails because something is faster or slower.
NOTICE_S = 1.0


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Script:
    return Script(tmp_path_factory.mktemp("script"))


@pytest.fixture(autouse=True)
def let_all_go(script: Script) -> Iterator[None]:
    """Release whatever a failed test has left behind, so that the next test can run."""
    yield
    for file in script.folder.glob("*.began"):
        script.go(file.stem)


@pytest.fixture(scope="module")
def scripted(checkpoints: Path, script: Script, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = link(checkpoints, tmp_path_factory.mktemp("steps"))
    config = deployment(
        folder,
        f"max_running = {MAX_RUNNING}",
        f"max_waiting = {MAX_WAITING}",
        'default_speculation = "none"',
        'placement = "separate"',
    )
    models = repository(folder, "speculative", "speculative_unary", target="target.py")
    with serving(config, repository=models, env={"SCRIPT_FOLDER": str(script.folder)}) as running:
        yield running


def check_serves(server: Server) -> None:
    """Check that the next request is served, and so that its place is free again."""
    answer = ask(server.grpc_url, text_input=PROMPT, max_tokens=3, cache_salt="free")
    assert answer.ids == text_at(3, 3) and answer.last["finish_reason"] == "length"


# Cancellation


def test_grpc_cancel_stops_within_one_step(scripted: Server, script: Script) -> None:
    script.go("grpc", 3)
    with Stream(scripted.grpc_url) as stream:
        stream.send(text_input=PROMPT, max_tokens=50, stream=True, cache_salt="grpc")
        assert [stream.receive().values["output_ids"] for _ in range(3)] == [[t] for t in text_at(3, 3)]
        script.await_step("grpc", 4)
        stream.cancel()
    time.sleep(NOTICE_S)
    script.go("grpc")
    assert script.await_end("grpc") == 4
    check_serves(scripted)


def test_grpc_cancel_ends_a_request_whose_step_waits(scripted: Server, script: Script) -> None:
    """The step may wait until the deadline: for blocks, or for the prompts of other requests."""
    script.go("waiting", 3)
    with Stream(scripted.grpc_url) as stream:
        stream.send(text_input=PROMPT, max_tokens=50, stream=True, cache_salt="waiting")
        script.await_step("waiting", 4)
        stream.cancel()
    assert script.await_end("waiting") == 4
    check_serves(scripted)


def test_generate_stream_hung_up_stops_within_one_step(scripted: Server, script: Script) -> None:
    script.go("http", 3)
    stream = EventStream(
        scripted.http_url, {"text_input": PROMPT, "max_tokens": 50, "stream": True, "cache_salt": "http"}
    )
    events = iter(stream)
    assert [listed(next(events)["output_ids"]) for _ in range(3)] == [[t] for t in text_at(3, 3)]
    script.await_step("http", 4)
    stream.close()
    time.sleep(NOTICE_S)
    script.go("http")
    assert script.await_end("http") == 4
    check_serves(scripted)


def test_unary_grpc_cancel_stops_within_one_step(scripted: Server, script: Script) -> None:
    script.go("unary", 3)
    with grpc.insecure_channel(scripted.grpc_url) as channel:
        request = infer_request("speculative_unary", text_input=PROMPT, max_tokens=50, cache_salt="unary")
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer.future(request)
        script.await_step("unary", 4)
        call.cancel()
        time.sleep(NOTICE_S)
        script.go("unary")
        assert script.await_end("unary") == 4


def test_request_cancelled_while_it_waits_never_begins_and_frees_its_place(scripted: Server, script: Script) -> None:
    with Stream(scripted.grpc_url) as running:
        for number in range(MAX_RUNNING):
            running.send(f"r{number}", text_input=PROMPT, max_tokens=2, cache_salt=f"busy{number}")
            script.await_step(f"busy{number}", 1)
        with Stream(scripted.grpc_url) as waiting:
            for number in range(MAX_WAITING):
                waiting.send(f"w{number}", text_input=PROMPT, max_tokens=2, cache_salt="cancelled")
            waiting.send("one too many", text_input=PROMPT, max_tokens=2, cache_salt="cancelled")
            assert "try again in" in waiting.answers("one too many")["one too many"].error
            waiting.cancel()
        # Its places are free once the server has noticed the cancellation.
        with Stream(scripted.grpc_url) as later:

            def is_taken() -> bool:
                later.send(text_input=PROMPT, max_tokens=2, cache_salt="free", timeout_ms=1)
                error = later.answers("r")["r"].error
                assert "try again in" in error or "until its deadline" in error
                return "deadline" in error

            until(is_taken, "a free place in the queue")
        for number in range(MAX_RUNNING):
            script.go(f"busy{number}")
        running.answers(*(f"r{number}" for number in range(MAX_RUNNING)))
    assert script.began("cancelled") == 0
    check_serves(scripted)


# Deadlines


@pytest.mark.parametrize("stream", [True, False])
def test_deadline_gives_the_text_so_far(scripted: Server, script: Script, stream: bool) -> None:
    name = f"deadline{stream}"
    script.go(name, 2)
    answer = ask(scripted.grpc_url, text_input=PROMPT, max_tokens=50, stream=stream, timeout_ms=1500, cache_salt=name)
    assert answer.last["finish_reason"] == "deadline"
    assert answer.ids == text_at(3, 2) and answer.last["num_steps"] == 2
    assert answer.text == "de"
    assert script.await_end(name) == 3


def test_deadline_that_the_engine_misses_ends_the_request_with_that_step(scripted: Server, script: Script) -> None:
    script.go("late", 2)
    with Stream(scripted.grpc_url) as stream:
        stream.send(text_input=PROMPT, max_tokens=50, stream=True, timeout_ms=300, cache_salt="late:late")
        script.await_step("late", 3)
        time.sleep(0.5)
        script.go("late")
        answer = stream.answers("r")["r"]
    assert answer.last["finish_reason"] == "deadline" and answer.ids == text_at(3, 3)
    assert script.await_end("late") == 3


def test_deadline_over_http(scripted: Server, script: Script) -> None:
    script.go("deadline-http", 2)
    body = {"text_input": PROMPT, "max_tokens": 50, "timeout_ms": 1000, "cache_salt": "deadline-http"}
    answer = generate(scripted.http_url, body)
    assert answer.status == 200 and answer.body["finish_reason"] == "deadline"
    assert answer.body["output_ids"] == text_at(3, 2)


def test_deadline_while_waiting_is_said(scripted: Server, script: Script) -> None:
    with Stream(scripted.grpc_url) as stream:
        for number in range(MAX_RUNNING):
            stream.send(f"r{number}", text_input=PROMPT, max_tokens=2, cache_salt=f"before{number}")
            script.await_step(f"before{number}", 1)
        stream.send("waits", text_input=PROMPT, max_tokens=2, cache_salt="never", timeout_ms=50)
        answer = stream.answers("waits")["waits"]
        assert answer.error == "busy: the request waited until its deadline"
        assert answer.responses[-1].final
        for number in range(MAX_RUNNING):
            script.go(f"before{number}")
        stream.answers("r0", "r1")
    assert script.began("never") == 0


# The queue


def test_queue_runs_some_holds_some_refuses_the_rest_and_serves_in_order(scripted: Server, script: Script) -> None:
    num_taken = MAX_RUNNING + MAX_WAITING
    names = [f"queue{number}" for number in range(num_taken + 2)]
    with Stream(scripted.grpc_url) as stream:
        for name in names[:MAX_RUNNING]:
            stream.send(name, text_input=PROMPT, max_tokens=2, cache_salt=name)
            script.await_step(name, 1)
        for name in names[MAX_RUNNING:]:
            stream.send(name, text_input=PROMPT, max_tokens=2, cache_salt=name)
        refused = stream.answers(*names[num_taken:])
        for answer in refused.values():
            assert re.fullmatch(
                rf"full: {MAX_RUNNING} requests run and {MAX_WAITING} wait; try again in \d+ s \(max_running, max_waiting in "
                r"the deployment file\)",
                answer.error,
            )
        http = generate(scripted.http_url, {"text_input": PROMPT, "cache_salt": "queue-http"})
        assert http.status >= 400 and "try again in" in http.error
        assert [script.began(name) for name in names] == [1] * MAX_RUNNING + [0] * (MAX_WAITING + 2)
        # One request ends: the one that has waited longest begins, and no other.
        script.go(names[0])
        assert stream.answers(names[0])[names[0]].ids == text_at(3, 2)
        script.await_step(names[MAX_RUNNING], 1)
        assert [script.began(name) for name in names[MAX_RUNNING + 1 :]] == [0] * (MAX_WAITING + 1)
        for name in names[1:num_taken]:
            script.go(name)
        for answer in stream.answers(*names[1:num_taken]).values():
            assert answer.ids == text_at(3, 2) and answer.last["finish_reason"] == "length"
    check_serves(scripted)


def test_places_are_shared_by_both_public_models(scripted: Server, script: Script) -> None:
    """Each of the two processes once ran max_running requests of its own."""
    streamed = [f"shared{number}" for number in range(MAX_RUNNING)]
    unary: dict[str, Any] = {"text_input": PROMPT, "max_tokens": 2, "cache_salt": "unary-shared"}
    with Stream(scripted.grpc_url) as stream, ThreadPoolExecutor() as others:
        for name in streamed:
            stream.send(name, text_input=PROMPT, max_tokens=2, cache_salt=name)
            script.await_step(name, 1)
        waiting = others.submit(infer, scripted.http_url, **unary)
        time.sleep(NOTICE_S)
        assert script.began("unary-shared") == 0
        script.go(streamed[0])
        script.await_step("unary-shared", 1)
        for name in (*streamed, "unary-shared"):
            script.go(name)
        assert waiting.result().body["output_ids"] == text_at(3, 2)
        stream.answers(*streamed)
    check_serves(scripted)


# Errors


@pytest.mark.parametrize(
    ("script_name", "said"),
    [
        ("fails at 3", "the engine failed on this request: scripted"),
        ("lies at 3", "target accepted nodes (7,), which are not a path of the tree"),
    ],
)
def test_target_that_fails_midway_ends_the_stream_with_its_error(
    scripted: Server, script: Script, script_name: str, said: str
) -> None:
    salt = f"free {script_name}:{script_name}"
    answer = ask(scripted.grpc_url, text_input=PROMPT, max_tokens=9, stream=True, cache_salt=salt)
    assert [part["output_ids"] for part in answer.parts] == [[t] for t in text_at(3, 2)]
    assert said in answer.error and answer.responses[-1].final
    line = rf"^[-0-9]+ [:,0-9]+ ERROR speculative \S+: request 'r' failed: .*{re.escape(said)}"
    assert re.search(line, scripted.log_path.read_text(), re.MULTILINE)
    assert script.await_end(f"free {script_name}") == 3
    events = generate_stream(
        scripted.http_url, {"text_input": PROMPT, "max_tokens": 9, "stream": True, "cache_salt": f"free2{salt}"}
    )
    assert [listed(event["output_ids"]) for event in events[:2]] == [[t] for t in text_at(3, 2)]
    assert said in events[-1]["error"] and len(events) == 3
    check_serves(scripted)


def test_target_that_forgets_is_sent_the_whole_context_again(scripted: Server, script: Script) -> None:
    answer = ask(scripted.grpc_url, text_input=PROMPT, max_tokens=9, cache_salt="free-forgets:forgets at 3")
    assert answer.ids == text_at(3, 9)
    assert script.await_end("free-forgets") == 2 + 7 * 2


def test_target_that_knows_nothing_even_of_a_whole_context_is_an_error(scripted: Server, script: Script) -> None:
    answer = ask(scripted.grpc_url, text_input=PROMPT, max_tokens=9, cache_salt="free-dull:knows nothing")
    assert "scripted" in answer.error and script.began("free-dull") == 1
    check_serves(scripted)


def test_final_flag_comes_once_and_last_whatever_happens(scripted: Server, script: Script) -> None:
    """Served, streamed, refused while reading, refused while checking, failed midway, cut by its deadline."""
    requests = {
        "whole": {"cache_salt": "free"},
        "streamed": {"cache_salt": "free", "stream": True},
        "unread": {"parameters": {"tempature": 1.0}},
        "unfit": {"max_tokens": 0},
        "failed": {"cache_salt": "free-final:fails at 3", "stream": True},
        "cut": {"cache_salt": "final-cut", "timeout_ms": 200},
    }
    answers: dict[str, Answer] = {}
    with Stream(scripted.grpc_url) as stream:
        for name, inputs in requests.items():
            stream.send(name, **{"text_input": PROMPT, "max_tokens": 5, **inputs})
            answers |= stream.answers(name)
        assert stream.finish() == []
    for name, answer in answers.items():
        assert [response.final for response in answer.responses].count(True) == 1, name
        assert answer.responses[-1].final, name
        assert bool(answer.error) == (name in ("unread", "unfit", "failed")), name
    assert answers["cut"].last["finish_reason"] == "deadline"
    check_serves(scripted)


# The unary sibling


def test_unary_waits_for_the_whole_text_and_says_why_it_ended(scripted: Server, script: Script) -> None:
    whole = ask_unary(scripted.grpc_url, text_input=PROMPT, max_tokens=4, cache_salt="free")
    assert whole["output_ids"] == text_at(3, 4) and whole["finish_reason"] == "length"
    script.go("unary-cut", 2)
    cut = ask_unary(scripted.grpc_url, text_input=PROMPT, max_tokens=4, cache_salt="unary-cut", timeout_ms=500)
    assert cut["output_ids"] == text_at(3, 2) and cut["finish_reason"] == "deadline"


@pytest.mark.parametrize("inputs", [{"max_tokens": 0}, {"cache_salt": "free-unary:fails at 3"}, {"timeout_ms": -1}])
def test_unary_error_is_an_error(scripted: Server, script: Script, inputs: dict[str, int | str]) -> None:
    inputs = {"text_input": PROMPT, "max_tokens": 5, **inputs}
    with pytest.raises(grpc.RpcError) as caught:
        ask_unary(scripted.grpc_url, **inputs)
    assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL)
    over_http = infer(scripted.http_url, **inputs)
    assert over_http.status in (400, 500) and over_http.error == caught.value.details()


def test_unary_stream_is_refused_and_costs_no_place(scripted: Server, script: Script) -> None:
    """Each such request once cost a thread and a place forever: with one more than the places, the model was dead."""
    for _ in range(MAX_RUNNING + MAX_WAITING + 1):
        answer = infer(scripted.http_url, text_input=PROMPT, stream=True, cache_salt="free")
        assert answer.status == 400 and "(input stream)" in answer.error
    assert infer(scripted.http_url, text_input=PROMPT, max_tokens=2, cache_salt="free").body["output_ids"] == text_at(
        3, 2
    )


def test_method_that_needs_a_drafter_is_refused_where_none_is_loaded(scripted: Server) -> None:
    answer = ask(scripted.grpc_url, text_input=PROMPT, speculation="draft_model", cache_salt="free")
    assert answer.error == (
        "method 'draft_model' needs the drafter 'draft', which this server has not loaded (key draft in the deployment file)"
    )
    check_serves(scripted)
