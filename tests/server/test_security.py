"""What clients cannot reach, and what no answer may contain, on a real server and a gateway (docs/security.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from orchestrator.core.messages.codec import encode_call
from orchestrator.core.messages.context import Release
from tests.fuzz.public import Doors, fuzz, served
from tests.support.clients import ask, generate, post
from tests.support.leaks import leak_in

pytestmark = pytest.mark.server

#: Enough that each path also gets a sound request.
CASES = 250
PATHS = {
    "/v2/models/speculative/generate", "/v2/models/speculative/generate_stream", "stream", "/v1/completions",
    "/v1/chat/completions", "/tokenize",
}  # fmt: skip


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Any, Doors]]:
    with served() as found:
        yield found


def call_target(url: str, message: np.ndarray) -> str:
    """Call the engine model as a client; return the error."""
    request = service_pb2.ModelInferRequest(model_name="target")
    request.inputs.add(name="message", datatype="UINT8", shape=message.shape)
    request.raw_input_contents.append(message.tobytes())
    with grpc.insecure_channel(url) as channel, pytest.raises(grpc.RpcError) as refused:
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=30)
    return str(refused.value.details())


@pytest.mark.parametrize(
    "message", [encode_call(Release(9), "a guess"), encode_call(Release(9), "")], ids=["guess", "no key"]
)
def test_an_engine_model_answers_only_the_server_itself(running: tuple[Any, Doors], message: np.ndarray) -> None:
    said = call_target(running[1].grpc, message)
    assert "only the server itself may call this model" in said and not leak_in(said)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/repository/models/speculative/unload", {}),
        ("/v2/repository/models/target/load", {}),
        ("/v2/repository/index", {}),
        ("/v2/systemsharedmemory/region/a/register", {"key": "/a", "byte_size": 8}),
        ("/v2/systemsharedmemory/unregister", {}),
        ("/v2/cudasharedmemory/region/a/register", {"raw_handle": {"b64": "YQ=="}, "device_id": 0, "byte_size": 8}),
        ("/v2/models/speculative/trace/setting", {"trace_level": ["TENSORS"]}),
        ("/v2/trace/setting", {"trace_level": ["TENSORS"]}),
        ("/v2/logging", {"log_file": "x"}),
    ],
)
def test_administration_is_closed(running: tuple[Any, Doors], path: str, body: Any) -> None:
    answer = post(running[1].http, path, body)
    assert answer.status == 403, answer
    assert ask(running[1].grpc, input_ids=[5, 6], max_tokens=2).ids


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("RepositoryModelLoad", service_pb2.RepositoryModelLoadRequest(model_name="target")),
        ("RepositoryModelUnload", service_pb2.RepositoryModelUnloadRequest(model_name="speculative")),
        ("RepositoryIndex", service_pb2.RepositoryIndexRequest()),
        ("SystemSharedMemoryRegister", service_pb2.SystemSharedMemoryRegisterRequest(name="a", key="/a", byte_size=8)),
        ("SystemSharedMemoryStatus", service_pb2.SystemSharedMemoryStatusRequest()),
        (
            "CudaSharedMemoryRegister",
            service_pb2.CudaSharedMemoryRegisterRequest(name="a", raw_handle=b"a", byte_size=8),
        ),
        ("TraceSetting", service_pb2.TraceSettingRequest()),
        ("LogSettings", service_pb2.LogSettingsRequest()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_administration_is_closed_over_grpc(running: tuple[Any, Doors], method: str, message: Any) -> None:
    with grpc.insecure_channel(running[1].grpc) as channel, pytest.raises(grpc.RpcError) as refused:
        getattr(service_pb2_grpc.GRPCInferenceServiceStub(channel), method)(message, timeout=30)
    assert "restricted" in str(refused.value.details()), refused.value
    assert ask(running[1].grpc, input_ids=[5, 6], max_tokens=2).ids


PROVOKED: list[dict[str, Any]] = [
    {"text_input": ""},
    {"text_input": "a", "max_tokens": 10**6},
    {"text_input": "a", "speculation": "no such method"},
    {"text_input": "a", "speculation": "medusa"},
    {"text_input": "a", "speculation": "suffix", "speculation_config": "{"},
    {"text_input": "a", "speculation": "suffix", "speculation_config": '{"x": ' + "[" * 90 + "]" * 90 + "}"},
    {"text_input": "a", "speculation": "ngram"},
    {"text_input": "a", "rule": "fair"},
    {"text_input": "a", "guided_decoding_guide_type": "regex", "guided_decoding_guide": "("},
    {
        "text_input": "a",
        "guided_decoding_guide_type": "json_schema",
        "guided_decoding_guide": '{"$ref": "file:///etc/x"}',
    },
    {"text_input": "a", "guided_decoding_guide_type": "json_schema", "guided_decoding_guide": "{"},
    {"text_input": "a", "logit_bias_ids": [10**9], "logit_bias_weights": [1.0]},
    {"text_input": "a", "unheard_of": 1},
    {"text_input": "a", "temperature": "hot"},
]


@pytest.mark.parametrize("body", PROVOKED, ids=str)
def test_no_error_names_what_is_inside(running: tuple[Any, Doors], body: dict[str, Any]) -> None:
    answer = generate(running[1].http, body)
    assert answer.status != 200 and answer.error
    assert not leak_in(answer.error), answer.error


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/models/../x", "/playground/%2e%2e/app"]
)
@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b'{"prompt": {}}', b'{"messages": [{"role": 3}]}'])
def test_no_error_of_the_gateway_names_what_is_inside(running: tuple[Any, Doors], path: str, body: bytes) -> None:
    answer = post(running[1].gateway, path, body)
    assert 400 <= answer.status < 500
    assert not leak_in(str(answer.body).replace(path, "")), answer


def test_wrong_requests_get_answers(running: tuple[Any, Doors]) -> None:
    seen: Counter[str] = Counter()
    fuzz(*running, CASES, seen)
    assert {answer.rpartition(" ")[0] for answer in seen if answer.endswith((" 200", " OK"))} == PATHS, seen


@pytest.mark.parametrize(
    "text", ["Traceback (most recent call last)", "/tmp/x/model.py", "KeyError: 'a'", "orchestrator.core.messages"]
)
def test_a_leak_is_noticed(text: str) -> None:
    assert leak_in(text)
    assert not leak_in("max_tokens must be in 1..20, got 21 (input max_tokens)")
