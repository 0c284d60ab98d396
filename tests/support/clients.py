"""A server's protocols as the tests use them: gRPC streams, unary gRPC, /generate, /generate_stream, /infer.

Every wait has a limit. gRPC goes through the bare stub: tritonclient hides which request an error belongs to, and where
the FINAL flags are.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import re
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.input_kinds import kind_of

LIMIT_S = 300.0
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

#: Datatype of each kind of input, and the field of InferTensorContents that carries it.
DATATYPES = {
    "text": "BYTES", "texts": "BYTES", "int": "INT32", "ints": "INT32", "float": "FP32", "floats": "FP32", "bool": "BOOL",
    "seed": "UINT64", "any": "INT32",
}  # fmt: skip
FIELDS = {
    "BYTES": "bytes_contents", "INT32": "int_contents", "UINT32": "uint_contents", "FP32": "fp32_contents",
    "BOOL": "bool_contents", "UINT64": "uint64_contents",
}  # fmt: skip


class Tensor(NamedTuple):
    """An input that is sent as it is, for what no sound client would send."""

    datatype: str
    shape: tuple[int, ...]
    values: list[Any]


def until(condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
    """Wait until a condition returns something true, and return that; fail after `limit_s`."""
    end_s = time.monotonic() + limit_s
    while not (answer := condition()):
        assert time.monotonic() < end_s, f"waited {limit_s:g} s for {what}"
        time.sleep(0.02)
    return answer


def settled(count: Callable[[], float], what: str) -> float:
    """Wait until a count has been the same 20 times in a row, and return it."""
    seen = [count()]

    def is_settled() -> bool:
        seen.append(count())
        return len(seen) > 20 and len(set(seen[-20:])) == 1

    until(is_settled, what)
    return seen[-1]


def infer_request(model: str, request_id: str = "", parameters: dict[str, Any] | None = None, **inputs: Any) -> Any:
    """Return a ModelInferRequest; a list becomes a tensor of shape (1, n), a scalar one of (1, 1)."""
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    for name, value in inputs.items():
        tensor = value if isinstance(value, Tensor) else _tensor(name, value)
        sent = request.inputs.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
        values = [v.encode() if isinstance(v, str) else v for v in tensor.values]
        getattr(sent.contents, FIELDS[tensor.datatype]).extend(values)
    for name, value in (parameters or {}).items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
        setattr(request.parameters[name], kind, value)
    return request


def _tensor(name: str, value: Any) -> Tensor:
    values = value if isinstance(value, list) else [value]
    return Tensor(DATATYPES[kind_of(name)], (1, len(values)), values)


@dataclass
class Response:
    """One message of a stream. values: outputs by name, scalars unwrapped; None if there were none."""

    id: str
    error: str = ""
    final: bool = False
    values: dict[str, Any] | None = None


@dataclass
class Answer:
    """All responses to one request, up to and including its FINAL flag."""

    responses: list[Response] = field(default_factory=list)

    @property
    def parts(self) -> list[dict[str, Any]]:
        """The outputs of each response that had any."""
        return [r.values for r in self.responses if r.values is not None]

    @property
    def error(self) -> str:
        """The error, "" if there was none."""
        return next((r.error for r in self.responses if r.error), "")

    @property
    def text(self) -> str:
        """The deltas of the text, joined."""
        return "".join(part["text_output"] for part in self.parts)

    @property
    def ids(self) -> list[int]:
        """The deltas of the ids, joined."""
        return [token for part in self.parts for token in part["output_ids"]]

    @property
    def last(self) -> dict[str, Any]:
        """The outputs of the response with the summary."""
        assert not self.error, self.error
        (last,) = [part for part in self.parts if "finish_reason" in part]
        assert last is self.parts[-1]
        return last

    @property
    def stats(self) -> dict[str, Any]:
        """The statistics that `return_stats` asked for."""
        found: dict[str, Any] = json.loads(self.last["stats"])
        return found


class Stream:
    """One gRPC stream to `speculative`, for many requests with different ids."""

    def __init__(self, url: str) -> None:
        self._channel = grpc.insecure_channel(url)
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[Response | grpc.RpcError | None] = queue.SimpleQueue()
        self._call = service_pb2_grpc.GRPCInferenceServiceStub(self._channel).ModelStreamInfer(
            iter(self._outbox.get, None)
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Ended, not cancelled: Triton 2.51 keeps a stream that is cancelled after an error, and with it the model, so
        # that the model cannot be unloaded; a server that is stopped waits for it until its exit time-out.
        self._outbox.put(None)
        if error:
            self._call.cancel()
        self._reader.join(LIMIT_S)
        self._channel.close()

    def send(self, request_id: str = "r", model: str = "speculative", **inputs: Any) -> None:
        """Send a request and ask for its FINAL flag."""
        parameters = {"triton_enable_empty_final_response": True} | inputs.pop("parameters", {})
        self._outbox.put(infer_request(model, request_id, parameters, **inputs))

    def receive(self, limit_s: float = LIMIT_S) -> Response:
        """Return the next message; raises grpc.RpcError when the stream has ended."""
        try:
            message = self._inbox.get(timeout=limit_s)
        except queue.Empty:
            raise AssertionError(f"no response within {limit_s:g} s") from None
        if isinstance(message, grpc.RpcError):
            raise message
        assert message is not None, "the stream has ended"
        return message

    def answers(self, *request_ids: str) -> dict[str, Answer]:
        """Receive until each of these requests has had its FINAL flag; return their answers."""
        found = {request_id: Answer() for request_id in request_ids}
        waiting = set(request_ids)
        while waiting:
            response = self.receive()
            assert response.id in waiting, f"{response} is for no request that waits: {waiting}"
            found[response.id].responses.append(response)
            if response.final:
                waiting.remove(response.id)
        return found

    def ask(self, **inputs: Any) -> Answer:
        """Send one request and return its answer."""
        self.send("r", **inputs)
        return self.answers("r")["r"]

    def finish(self) -> list[Response]:
        """Close the sending side; return the messages that still come until the server closes its own."""
        self._outbox.put(None)
        rest = []
        while (message := self._inbox.get(timeout=LIMIT_S)) is not None:
            if isinstance(message, grpc.RpcError):
                raise message
            rest.append(message)
        return rest

    def cancel(self) -> None:
        """Cancel the stream at once, whatever is under way."""
        self._call.cancel()

    def _read(self) -> None:
        try:
            for message in self._call:
                self._inbox.put(_response(message.infer_response, message.error_message))
        except grpc.RpcError as error:
            self._inbox.put(error)
        else:
            self._inbox.put(None)


def _response(message: Any, error: str) -> Response:
    final = message.parameters["triton_final_response"].bool_param if message.parameters else False
    return Response(message.id, error, final, outputs_of(message) if message.outputs else None)


def outputs_of(message: Any) -> dict[str, Any]:
    """Return the outputs of a ModelInferResponse by name, scalars unwrapped."""
    values: dict[str, Any] = {}
    for output, raw in zip(message.outputs, message.raw_output_contents, strict=True):
        assert output.shape[0] == 1, f"{output.name}: the batch of one is kept"
        items = _items(output.datatype, raw)
        values[output.name] = items if output.name in LISTS else items[0]
    return values


LISTS = frozenset({"output_ids", "step_lengths", "step_draft_tokens", "step_accepted_tokens", "output_log_probs"})


def _items(datatype: str, raw: bytes) -> list[Any]:
    if datatype != "BYTES":
        return list(struct.unpack(f"<{len(raw) // 4}{'i' if datatype == 'INT32' else 'f'}", raw))
    items = []
    while raw:
        size = struct.unpack_from("<I", raw)[0]
        items.append(raw[4 : 4 + size].decode())
        raw = raw[4 + size :]
    return items


def ask(url: str, **inputs: Any) -> Answer:
    """Send one request to `speculative` over a gRPC stream of its own; return its answer."""
    with Stream(url) as stream:
        return stream.ask(**inputs)


def ask_unary(url: str, model: str = "speculative_unary", **inputs: Any) -> dict[str, Any]:
    """Send a request over unary gRPC; return its outputs, or raise grpc.RpcError."""
    parameters = inputs.pop("parameters", {})
    with grpc.insecure_channel(url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return outputs_of(stub.ModelInfer(infer_request(model, "u", parameters, **inputs), timeout=LIMIT_S))


# HTTP


class Http(NamedTuple):
    """An answer over HTTP. body: decoded if it is JSON, else text."""

    status: int
    body: Any

    @property
    def error(self) -> str:
        """The error in the body, "" if it has none."""
        return self.body.get("error", "") if isinstance(self.body, dict) else ""


def connect(url: str, limit_s: float = LIMIT_S) -> http.client.HTTPConnection:
    """Open a connection."""
    parts = urllib.parse.urlsplit(url)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=limit_s)


def fetch(url: str, path: str, method: str = "GET", body: str | bytes | None = None) -> Http:
    """Send a request and return the answer; raises OSError for a broken connection."""
    connection = connect(url)
    try:
        connection.request(method, path, body)
        response = connection.getresponse()
        text = response.read()
    finally:
        connection.close()
    try:
        return Http(response.status, json.loads(text))
    except ValueError:
        return Http(response.status, text.decode(errors="replace"))


def post(url: str, path: str, body: Any) -> Http:
    """POST `body` as JSON, or as it is if it is bytes."""
    return fetch(url, path, "POST", body if isinstance(body, bytes) else json.dumps(body))


def generate(url: str, body: Any, model: str = "speculative") -> Http:
    """POST to /generate."""
    return post(url, f"/v2/models/{model}/generate", body)


def infer(url: str, model: str = "speculative_unary", **inputs: Any) -> Http:
    """POST to /infer. body of the answer: outputs by name, scalars unwrapped."""
    tensors = {name: v if isinstance(v, Tensor) else _tensor(name, v) for name, v in inputs.items()}
    sent = [{"name": n, "datatype": t.datatype, "shape": t.shape, "data": t.values} for n, t in tensors.items()]
    answer = post(url, f"/v2/models/{model}/infer", {"inputs": sent})
    if answer.status != 200:
        return answer
    outputs = {o["name"]: o["data"] for o in answer.body["outputs"]}
    return Http(200, {name: data if name in LISTS else data[0] for name, data in outputs.items()})


class EventStream:
    """A running /generate_stream, whose events are read one by one; it can be closed in the middle."""

    def __init__(self, url: str, body: Any, model: str = "speculative") -> None:
        self._connection = connect(url)
        self._connection.request("POST", f"/v2/models/{model}/generate_stream", json.dumps(body))
        self._socket = self._connection.sock
        self._response = self._connection.getresponse()
        self.status = self._response.status

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for line in self._response:
            if line.startswith(b"data: "):
                yield json.loads(line[len(b"data: ") :])

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._response.close()
        self._connection.close()


def generate_stream(url: str, body: Any) -> list[dict[str, Any]]:
    """POST to /generate_stream; return all events."""
    stream = EventStream(url, body)
    try:
        assert stream.status == 200
        return list(stream)
    finally:
        stream.close()


def listed(value: Any) -> list[Any]:
    """Return a value as a list: /generate gives a list of one as a scalar."""
    return value if isinstance(value, list) else [value]


def metric(metrics_url: str, name: str, **labels: str) -> float:
    """Return the value of one series of the metrics port."""
    return series_in(fetch(metrics_url, urllib.parse.urlsplit(metrics_url).path).body, name, **labels)


def series_in(text: str, name: str, **labels: str) -> float:
    """Return the value of the first series of this name, among those of a metrics port, that has all these labels."""
    for line in text.splitlines():
        match = re.fullmatch(rf"{name}\{{(.*)\}} (\S+)", line)
        if match and labels.items() <= dict(_LABEL.findall(match[1])).items():
            return float(match[2])
    raise AssertionError(f"no series {name} {labels} in the metrics")
