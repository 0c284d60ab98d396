"""The application over a stand-in replica: ids, pings, origins, metrics; slow work holds up no other request."""

import contextlib
import gc
import json
import logging
import re
import socket
import threading
import tomllib
import urllib.parse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from fastapi.responses import JSONResponse

from gateway import answers, bodies
from gateway.fields import ChatFields, CompletionFields
from gateway.parsing import parse
from gateway.replicas import Replica
from gateway.tokenizer import Checkpoint
from gateway.triton import Refused, ReplicaError
from tests.support.clients import until
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.standin_replica import Fault, StandInReplica, text_of

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]
BODY = {"prompt": "abc", "seed": 3, "max_tokens": 6}
LIMIT_S = 20


@contextlib.contextmanager
def gateway_over(replica: StandInReplica, folder: Path, **settings: Any) -> Iterator[RunningGateway]:
    replica.requests.clear()
    with running_gateway(replica.address, folder, **settings) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def gateway(replica: StandInReplica, folder: Path) -> Iterator[RunningGateway]:
    with gateway_over(
        replica, folder, allowed_origins="https://a.example, https://b.example", ping_interval_s=0.1
    ) as running:
        yield running


def events_of(answer: httpx.Response) -> list[str]:
    return [part for part in answer.text.split("\n\n") if part]


# Ids, origins


def test_a_request_has_one_id_in_header_log_and_server(
    gateway: RunningGateway, replica: StandInReplica, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="gateway")
    given = gateway.post("/v1/completions", BODY, headers={"X-Request-Id": "mine-7"})
    assert given.headers["X-Request-Id"] == replica.ids[-1] == "mine-7"
    until(lambda: "request mine-7" in caplog.text, "the line of the request")
    (line,) = [message for message in caplog.messages if "mine-7" in message]
    assert line.startswith("POST /v1/completions 200 ")

    for bad in ("", "two words", "x" * 129):
        made = gateway.post("/v1/completions", BODY, headers={"X-Request-Id": bad})
        assert made.headers["X-Request-Id"] == replica.ids[-1] != bad and len(replica.ids[-1]) == 32
    assert gateway.get("/nothing").headers["X-Request-Id"]


@pytest.mark.parametrize("streams", [True, False])
def test_fields_that_change_nothing_are_named_in_a_header(gateway: RunningGateway, streams: bool) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "stream": streams}
    assert "X-Ignored-Fields" not in gateway.post("/v1/chat/completions", body).headers
    answer = gateway.post("/v1/chat/completions", body | {"verbosity": "low", "store": False, "metadata": None})
    assert answer.headers["X-Ignored-Fields"] == "store, verbosity"


def test_other_origins_are_not_let_in(gateway: RunningGateway) -> None:
    for origin, allowed in (("https://b.example", "https://b.example"), ("https://c.example", None)):
        answer = gateway.post("/v1/completions", BODY, headers={"Origin": origin})
        assert answer.headers.get("Access-Control-Allow-Origin") == allowed


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/version", "/v1/models", "/metrics", "/", "/playground/methods"]
)
def test_what_can_be_read_can_be_probed_with_head(gateway: RunningGateway, path: str) -> None:
    with socket.create_connection(urllib.parse.urlsplit(gateway.url).netloc.split(":"), LIMIT_S) as connection:
        connection.sendall(f"HEAD {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"\r\n\r\n"), answer


@pytest.mark.parametrize(
    ("method", "path", "status", "allowed"),
    [
        ("GET", "/v1/completions", 405, {"POST"}),
        ("DELETE", "/v1/models/it", 405, {"GET", "HEAD"}),
        ("POST", "/v1/completions/", 404, {""}),
        ("GET", "/playground", 404, {""}),
    ],
)
def test_what_is_no_endpoint_is_not_redirected_and_says_what_is_allowed(
    gateway: RunningGateway, method: str, path: str, status: int, allowed: set[str]
) -> None:
    """Behind a proxy for TLS a redirect would name http://, and clients would repeat their body there in clear."""
    answer = httpx.request(method, gateway.url + path, timeout=LIMIT_S)
    assert answer.status_code == status
    given = answer.headers.get("Allow", "")
    assert set(given.split(", ")) == allowed
    error = answer.json()["error"]
    assert error["code"] == "unknown_url" and path in error["message"] and given in error["message"]


def test_proxies_do_not_collect_the_events_of_a_stream(gateway: RunningGateway) -> None:
    assert gateway.post("/v1/completions", BODY | {"stream": True}).headers["X-Accel-Buffering"] == "no"


def test_reasons_are_counted_from_the_first_event_on(gateway: RunningGateway) -> None:
    """Prometheus' increase() ignores the first sample of a series, for example of a replica that dies with 20 streams.

    Every reason of an error (gateway/triton.py) is shown from the start, except that of a request that is wrong.
    """
    shown = re.findall(
        r'^spec_gateway_(failovers|refusals)_total\{reason="(\w+)"\} ', gateway.get("/metrics").text, re.M
    )
    reasons = {error.reason for error in (ReplicaError, *ReplicaError.__subclasses__())} - {Refused.reason}
    assert {reason for _, reason in shown} == reasons


def test_template_arguments_do_not_replace_the_messages(gateway: RunningGateway, replica: StandInReplica) -> None:
    num_requests, message = len(replica.requests), {"role": "user", "content": "a"}
    hidden = {"messages": [message], "chat_template_kwargs": {"messages": [message | {"content": "b"}]}}
    error = gateway.post("/v1/chat/completions", hidden).json()["error"]
    assert error["param"] == "chat_template_kwargs" and len(replica.requests) == num_requests


def test_models_and_version(gateway: RunningGateway, folder: Path) -> None:
    (card,) = gateway.get("/v1/models").json()["data"]
    assert card == gateway.get(f"/v1/models/{folder.name}").json()
    assert card["max_model_len"] == 512 and card["created"] == gateway.state.created > 1_700_000_000
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert gateway.get("/version").json() == {"version": declared}


def test_an_error_within_is_a_500_with_its_id(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.state, "model_card", lambda: 1 / 0)
    answer = gateway.get("/v1/models", headers={"X-Request-Id": "it"})
    assert (answer.status_code, answer.headers["X-Request-Id"]) == (500, "it")
    assert gateway.metric('spec_gateway_requests_total{endpoint="/v1/models",status="500"}') == 1


@pytest.mark.parametrize(
    ("given", "affinity"),
    [
        ({"prompt_cache_key": "chat 7", "user": "me"}, "chat 7"),
        ({"prompt_cache_key": "", "user": "me"}, "me"),
        ({"user": "me"}, "me"),
        ({}, ""),
    ],
)
def test_the_client_names_what_belongs_to_one_replica(
    gateway: RunningGateway, given: dict[str, str], affinity: str
) -> None:
    fields = parse(CompletionFields, json.dumps(BODY | {"n": 2} | given).encode())
    assert [sequence.affinity for sequence in gateway.state.completion(fields, "id").sequences] == [affinity] * 2


# Streams that wait


def test_a_stream_that_waits_carries_pings(gateway: RunningGateway, replica: StandInReplica) -> None:
    replica.faults = [Fault(0, pause_s=0.5)]
    events = events_of(gateway.post("/v1/completions", BODY | {"stream": True}))

    assert events[0] == ": ping" and events[-1] == "data: [DONE]"
    data = [json.loads(event.removeprefix("data: ")) for event in events[:-1] if event != ": ping"]
    assert "".join(chunk["choices"][0]["text"] for chunk in data) == text_of(3, 6)


def test_a_refusal_behind_a_ping_is_an_event(gateway: RunningGateway, replica: StandInReplica) -> None:
    refusal = Fault(0, grpc.StatusCode.INVALID_ARGUMENT, "top_p must be in 0..1 (input top_p)")
    replica.faults = [replace(refusal, delay_s=0.5)]
    answer = gateway.post("/v1/completions", BODY | {"stream": True})

    *_, error, done = events_of(answer)
    assert answer.status_code == 200 and done == "data: [DONE]"
    assert json.loads(error.removeprefix("data: "))["error"]["param"] == "top_p"
    replica.faults = [refusal]
    assert gateway.post("/v1/completions", BODY | {"stream": True}).status_code == 400


def test_a_prompt_that_is_too_long_for_the_target_has_openais_code(
    gateway: RunningGateway, replica: StandInReplica
) -> None:
    words = "the prompt has 40 tokens, at most 31 allowed (context of the target, input input_ids)"
    replica.faults = [Fault(0, grpc.StatusCode.INVALID_ARGUMENT, words)]
    error = gateway.post("/v1/completions", BODY).json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


def test_only_a_prediction_has_accepted_and_rejected_tokens(gateway: RunningGateway) -> None:
    """Every step of the stand-in drafts two tokens and accepts none."""
    prediction = {"type": "content", "content": "xyz"}
    for given, num_rejected in (
        ({}, 0),
        ({"prediction": prediction}, 12),
        ({"prediction": {**prediction, "content": ""}}, 0),
    ):
        body = gateway.post("/v1/completions", BODY | given).json()
        assert body["usage"]["completion_tokens_details"] == {
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": num_rejected,
        }
        assert body["metrics"]["speculative_decoding"]["num_draft_tokens"] == 12


# Work that takes long


def test_a_whole_response_is_written_off_the_event_loop(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    class Noted(JSONResponse):
        def render(self, content: Any) -> bytes:
            threads.append(threading.current_thread())
            return super().render(content)

    monkeypatch.setattr(answers, "JSONResponse", Noted)
    assert gateway.post("/v1/completions", BODY).json()["choices"][0]["text"] == text_of(3, 6)
    assert [thread.name.rpartition("_")[0] for thread in threads] == ["gateway-work"]


def test_ids_beyond_the_vocabulary_are_refused_off_the_event_loop(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    size = property(lambda _: threads.append(threading.current_thread()) or 258)
    monkeypatch.setattr(Checkpoint, "vocab_size", size)
    answer = gateway.post("/detokenize", {"tokens": [1, 900]})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")
    assert [thread.name.rpartition("_")[0] for thread in threads] == ["gateway-work"]


@pytest.mark.parametrize(
    ("path", "body", "method"),
    [
        ("/tokenize", {"prompt": "abc"}, "encode"),
        ("/detokenize", {"tokens": [1]}, "decode"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}, "encode"),
        ("/v1/completions", {"prompt": [1], "echo": True, "max_tokens": 2}, "decode"),
        ("/v1/completions", {"prompt": "a", "logprobs": 0, "max_tokens": 2}, "token_bytes"),
    ],
)
def test_slow_work_holds_up_no_other_request(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], method: str
) -> None:
    begun, may_end, real = threading.Event(), threading.Event(), getattr(Checkpoint, method)

    def slow(*arguments: Any, **options: Any) -> Any:
        begun.set()
        assert may_end.wait(LIMIT_S)
        return real(*arguments, **options)

    monkeypatch.setattr(Checkpoint, method, slow)
    statuses: list[int] = []
    asking = threading.Thread(target=lambda: statuses.append(gateway.post(path, body).status_code))
    asking.start()
    try:
        assert begun.wait(LIMIT_S)
        assert httpx.get(f"{gateway.url}/health", timeout=LIMIT_S / 2).status_code == 200
    finally:
        may_end.set()
        asking.join(LIMIT_S)
    assert statuses == [200]


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/v1/completions", "prompt"),
        ("/v1/chat/completions", "messages"),
        ("/tokenize", "prompt"),
        ("/tokenize", "messages"),
    ],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(
    gateway: RunningGateway, replica: StandInReplica, monkeypatch: pytest.MonkeyPatch, path: str, param: str
) -> None:
    monkeypatch.setattr(Checkpoint, "encode", lambda *_: pytest.fail("encoded"))
    num_requests, text = len(replica.requests), "a" * 100_000
    answer = gateway.post(path, {param: [{"role": "user", "content": text}] if param == "messages" else text})

    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert error["code"] == "context_length_exceeded"
    assert "100000 bytes" in error["message"] and "512 tokens" in error["message"]
    assert len(replica.requests) == num_requests


def test_a_text_beyond_the_context_can_be_counted_and_as_many_tokens_as_the_context_has_decoded(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gateway.post("/tokenize", {"prompt": "a" * 600}).json()["count"] > 512
    assert gateway.post("/detokenize", {"tokens": [1] * 512}).status_code == 200
    monkeypatch.setattr(Checkpoint, "decode", lambda *_: pytest.fail("decoded"))
    error = gateway.post("/detokenize", {"tokens": [1] * 513}).json()["error"]
    assert (error["param"], error["code"]) == ("tokens", "context_length_exceeded")
    assert "513 tokens, at most 512 allowed" in error["message"]


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_prompt_of_too_many_tokens_is_not_sent_once_for_each_choice(
    gateway: RunningGateway, replica: StandInReplica, is_chat: bool
) -> None:
    num_requests, path = len(replica.requests), "/v1/chat/completions" if is_chat else "/v1/completions"
    for length, status in ((511, 200), (512, 400)):
        chat = {"messages": [{"role": "user", "content": "a" * length}]}  # a token for each letter
        prompt = chat if is_chat else {"prompt": [1] * length}
        answer = gateway.post(path, prompt | {"n": 2, "max_tokens": 1})
        assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("messages" if is_chat else "prompt", "context_length_exceeded")
    assert "512 tokens, at most 511" in error["message"] and len(replica.requests) == num_requests + 2


@pytest.mark.parametrize(
    "many", [{"prediction": {"type": "content", "content": "a" * 90_000}}, {"stop": ["a"] * 18_000}]
)
def test_what_each_choice_sends_again_is_limited(replica: StandInReplica, folder: Path, many: dict[str, Any]) -> None:
    """Otherwise a body of 8 MiB with n = 32 becomes 256 MiB, here and in the shared memory of a server."""
    with gateway_over(replica, folder, max_body_bytes=100_000) as gateway:
        body = BODY | many | {"max_tokens": 1}
        assert gateway.post("/v1/completions", body | {"n": 2}).status_code == 200
        error = gateway.post("/v1/completions", body | {"n": 8}).json()["error"]
        assert error["param"] == "n" and "at most 400000 allowed (4 × max_body_bytes)" in error["message"]
        refused = gateway.post("/v1/completions", body | {"prompt": ["abc"] * 4, "n": 2})
        assert refused.status_code == 400 and len(replica.requests) == 2


def test_a_request_keeps_none_of_its_body_while_it_runs(gateway: RunningGateway, replica: StandInReplica) -> None:
    """Without limits of their own, fields without effect would stay in memory as long as the text takes."""
    kept, kinds = list[Any](), (CompletionFields, ChatFields)
    gc.collect()  # what earlier tests have left
    replica.on_request = lambda: kept.extend(each for each in gc.get_objects() if type(each) in kinds)
    try:
        assert gateway.post("/v1/completions", BODY | {"metadata": ["a"]}).status_code == 200
        chat = {"messages": [{"role": "user", "content": "a", "more": ["a"]}], "max_tokens": 2}
        assert gateway.post("/v1/chat/completions", chat).status_code == 200
    finally:
        replica.on_request = lambda: None
    assert not kept


# Refusals


def full(gateway: RunningGateway) -> Replica:
    """Let the one replica have said that it is full, for good."""
    (one,) = gateway.state.replicas.all.values()
    one.rest(7)
    one.resting_until_s = float("inf")
    return one


@contextlib.contextmanager
def unfinished(gateway: RunningGateway, path: str = "/v1/completions", key: str = "") -> Iterator[socket.socket]:
    """Send the head of a request whose body never comes, on a connection that stays open."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        "Content-Length: 9000\r\n\r\n"
    )
    with socket.create_connection(urllib.parse.urlsplit(gateway.url).netloc.split(":"), LIMIT_S) as connection:
        connection.sendall(head.encode())
        yield connection


def test_a_client_that_goes_while_it_sends_is_no_error_of_the_gateway(
    replica: StandInReplica, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with gateway_over(replica, folder) as gateway:
        with unfinished(gateway) as connection:
            connection.sendall(b'{"prompt"')
            until(lambda: gateway.metric("spec_gateway_requests_running") == 1, "the request")
        gone = 'spec_gateway_requests_total{endpoint="/v1/completions",status="499"}'
        until(lambda: gateway.metric("spec_gateway_requests_running") == 0, "its end")
        assert gateway.metric(gone) == 1 and "Traceback" not in caplog.text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_full_deployment_refuses_without_waiting_for_a_body(replica: StandInReplica, folder: Path, path: str) -> None:
    with gateway_over(replica, folder) as gateway:
        one = full(gateway)
        assert gateway.post(path, {"prompt": 3, "nonsense": True}).status_code == 429
        with unfinished(gateway, path) as connection:
            answer = connection.recv(65536).decode()
        assert answer.startswith("HTTP/1.1 429 ") and "retry-after: 7\r\n" in answer.lower()
        assert not replica.requests
        one.is_full = False
        one.resting_until_s = 0.0
        assert gateway.post("/v1/completions", BODY).status_code == 200


def test_a_full_deployment_tries_a_request_that_says_it_is_urgent(replica: StandInReplica, folder: Path) -> None:
    with gateway_over(replica, folder) as gateway:
        full(gateway)
        for priority in (None, 0, 3):
            assert gateway.post("/v1/completions", BODY | {"priority": priority}).status_code == 429
        assert not replica.requests
        assert gateway.post("/v1/completions", BODY | {"priority": -1}).status_code == 200
        assert [request["priority"] for request in replica.requests] == [[-1]]
        long = BODY | {"priority": -1, "metadata": "a" * bodies.SHORT_BYTES}
        assert gateway.post("/v1/completions", long).status_code == 429, "only short bodies are read"


def test_a_full_deployment_reads_few_bodies_at_once(
    replica: StandInReplica, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "LOOK_LIMIT_S", LIMIT_S)
    monkeypatch.setattr(bodies, "MAX_LOOKS", 1)
    urgent = BODY | {"priority": -1}
    with gateway_over(replica, folder) as gateway:
        full(gateway)
        with unfinished(gateway):
            until(lambda: gateway.metric("spec_gateway_requests_running") == 1, "the request")
            assert gateway.post("/v1/completions", urgent).status_code == 429
        until(lambda: gateway.metric("spec_gateway_requests_running") == 0, "its end")
        assert gateway.post("/v1/completions", urgent).status_code == 200


def test_with_salts_by_key_a_full_deployment_reads_no_body(
    replica: StandInReplica, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "LOOK_LIMIT_S", 10 * LIMIT_S)
    with gateway_over(replica, folder, api_keys="secret", salt_by_key=True, metrics_port=0) as gateway:
        full(gateway)
        with unfinished(gateway, key="secret") as connection:
            assert connection.recv(65536).startswith(b"HTTP/1.1 429 ")


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({}, "Content-Type must be application/json, got ''"),
        ({"Content-Type": "text/plain"}, "Content-Type must be application/json, got 'text/plain'"),
        ({"Content-Type": "application/json", "Content-Encoding": "gzip"}, "Content-Encoding must be absent or"),
    ],
    ids=["no type", "text", "gzip"],
)
def test_a_body_that_is_not_sent_as_plain_json_is_refused(
    replica: StandInReplica, folder: Path, headers: dict[str, str], words: str
) -> None:
    """A page of another site can make a browser send a body without a type, or as text, but not as JSON."""
    with gateway_over(replica, folder) as gateway:
        answer = httpx.post(f"{gateway.url}/v1/completions", content=json.dumps(BODY), headers=headers, timeout=LIMIT_S)

        assert answer.status_code == 415 and words in answer.json()["error"]["message"] and not replica.requests
        as_json = {"Content-Type": "Application/JSON; charset=utf-8"}
        assert gateway.post("/v1/completions", BODY, headers=as_json).status_code == 200
