"""The clients without a server: requests, responses, figures, colours, exit statuses."""

from __future__ import annotations

import io
import socket
from collections.abc import Iterator
from concurrent import futures
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from clients import generate, http_generate
from clients.generate import Chunk, Painter


def message(final: bool = False, **outputs: Any) -> Any:
    """Return a response as tritonclient hands it over."""
    response = SimpleNamespace(
        outputs=[SimpleNamespace(name=name) for name in outputs],
        parameters={"triton_final_response": SimpleNamespace(bool_param=final)},
    )
    return SimpleNamespace(get_response=lambda: response, as_numpy=lambda name: np.array([outputs[name]]))


class FakeClient:
    """Answers every request with the same script of responses and errors, and notes what it was asked."""

    def __init__(self, *script: Any) -> None:
        self.script = script
        self.sent: list[dict[str, Any]] = []
        self.cancelled: list[bool] = []

    def start_stream(self, callback: Any, stream_timeout: float) -> None:
        self.callback = callback

    def async_stream_infer(self, model: str, inputs: list[Any], enable_empty_final_response: bool) -> None:
        assert enable_empty_final_response
        self.sent.append({tensor.name(): tensor for tensor in inputs})
        for item in self.script:
            is_error = isinstance(item, Exception)
            self.callback(result=None if is_error else item, error=item if is_error else None)

    def stop_stream(self, cancel_requests: bool) -> None:
        self.cancelled.append(cancel_requests)


STEP = message(text_output=[b"ab"], output_ids=[1, 2], step_lengths=[2], num_output_tokens=[2])
LAST = message(text_output=[b"c"], output_ids=[3], step_lengths=[1], finish_reason=[b"length"], num_steps=[2])
FINAL = message(final=True)


def test_stream_yields_each_response_and_ends_at_the_final_flag() -> None:
    client = FakeClient(STEP, LAST, FINAL)

    chunks = list(generate.stream(client, "x", max_tokens=3))

    assert [(c.text, c.ids, c.step_lengths) for c in chunks] == [("ab", [1, 2], [2]), ("c", [3], [1])]
    assert [c.totals for c in chunks] == [{}, {"finish_reason": "length", "num_steps": 2}]
    assert client.cancelled == [False]


def test_stream_closed_early_cancels_the_request() -> None:
    client = FakeClient(STEP, LAST, FINAL)
    chunks = generate.stream(client, "x")

    next(chunks)
    chunks.close()

    assert client.cancelled == [True]


def test_stream_error_amid_the_text_is_raised_and_cancels() -> None:
    client = FakeClient(STEP, InferenceServerException("the pool is full"), FINAL)
    chunks = generate.stream(client, "x")

    assert next(chunks).text == "ab"
    with pytest.raises(InferenceServerException, match="the pool is full"):
        next(chunks)
    assert client.cancelled == [True]


def test_inputs_have_the_models_types_and_a_batch_of_one() -> None:
    options = {"text_input": "né", "stop_words": ["a", "bc"], "max_tokens": 5, "seed": 2**64 - 1, "top_p": 0.5}

    tensors = {t.name(): t for t in generate.to_inputs({**options, "stream": True, "top_k": None, "min_p": None})}

    found = {name: (tensor.datatype(), tensor.shape()) for name, tensor in tensors.items()}
    assert found == {
        "text_input": ("BYTES", [1, 1]),
        "stop_words": ("BYTES", [1, 2]),
        "max_tokens": ("INT32", [1, 1]),
        "seed": ("UINT64", [1, 1]),
        "top_p": ("FP32", [1, 1]),
        "stream": ("BOOL", [1, 1]),
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [({"max_token": 1}, "unknown option 'max_token'"), ({"seed": -1}, "seed"), ({"max_tokens": 2**31}, "max_tokens")],
)
def test_inputs_that_do_not_fit_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        generate.to_inputs(options)


def test_compare_takes_turns_and_starts_every_run_cold() -> None:
    client = FakeClient(STEP, LAST, FINAL)

    runs = generate.compare(client, "x", ["a", "b"], 2)

    asked = [[sent[name]._get_content() for name in ("speculation", "cache_salt")] for sent in client.sent]
    order = ["ab"["b" in method[4:].decode()] for method, _ in asked]
    assert "".join(order) == "abbaab"
    assert len({salt for _, salt in asked}) == 6
    assert [[run.method for run in some] for some in runs] == [["a", "a"], ["b", "b"]]


class Terminal(io.StringIO):
    """A text stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def colourful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.usefixtures("colourful")
def test_painter_lets_no_text_steer_the_terminal() -> None:
    out = Terminal()
    Painter(out)(Chunk("a\x1b[2Jb\n\tc", [1], [1], 0.0, {}))
    assert out.getvalue() == "a\ufffd[2Jb\n\tc"


@pytest.mark.parametrize(
    "arguments", [["x", "--max-tokens", "9999999999"], ["x", "--seed", "-1"], ["--file", "/no/such"]]
)
def test_parse_refuses_what_cannot_be_sent(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        generate.parse(arguments)
    assert error.value.code == 2


@pytest.fixture
def nobody() -> Iterator[str]:
    """Return an address where nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("client", [generate, http_generate])
def test_client_without_a_server_says_what_to_do(client: Any, nobody: str, capsys: Any) -> None:
    assert client.main(["x", "--url", nobody]) == 2

    error = capsys.readouterr().err
    assert nobody in error
    assert error.count("\n") == 1
    assert "--url" in error


class FullServer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Refuses every stream as a server does that has no place free, with gRPC's status for it."""

    def ModelStreamInfer(self, requests: Any, context: Any) -> None:  # noqa: N802
        context.abort(grpc.StatusCode.UNAVAILABLE, "full: 2 requests run and 3 wait; try again later (max_running, …)")


@pytest.fixture
def full() -> Iterator[str]:
    """Return the address of a server that is full."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(FullServer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_client_reports_a_full_server_as_full_not_as_absent(full: str, capsys: Any) -> None:
    assert generate.main(["x", "--url", full]) == 1

    error = capsys.readouterr().err
    assert "2 requests run and 3 wait" in error
    assert "no server" not in error
    assert error.count("\n") == 1
