"""One replica's public model over a gRPC stream: tensors in, the outputs of each response out."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import re
import struct
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

MODEL = "speculative"

_TYPES_BY_KIND = {
    "BYTES": "text_input stop_words bad_words speculation speculation_config rule cache_salt draft_text "
    "guided_decoding_guide_type guided_decoding_guide",
    "INT32": "input_ids generated_ids sequence_index max_tokens min_tokens timeout_ms top_k num_top_log_probs stop_ids "
    "num_draft_tokens allowed_token_ids logit_bias_ids priority",
    "FP32": "temperature top_p min_p typical_p repetition_penalty presence_penalty frequency_penalty "
    "logit_bias_weights typical_epsilon typical_delta",
    "BOOL": "stream ignore_eos return_log_probs return_stats stream_steps",
    "UINT64": "seed",
}
#: Datatype of each input that the gateway sends (docs/protocol.md, Public model).
DATATYPES = {name: kind for kind, names in _TYPES_BY_KIND.items() for name in names.split()}
_FIELDS = {
    "BYTES": "bytes_contents",
    "INT32": "int_contents",
    "FP32": "fp32_contents",
    "BOOL": "bool_contents",
    "UINT64": "uint64_contents",
}
_CODES = {"INT32": "i", "FP32": "f"}
#: Outputs that are lists, or tables with one column per top token; the others are scalars.
LISTS = frozenset(
    {"output_ids", "step_lengths", "step_draft_tokens", "step_accepted_tokens", "output_log_probs", "top_ids",
     "top_log_probs"}
)  # fmt: skip
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # No keepalive pings: Triton accepts one in 300 s, and ends a connection that sends more, with all its streams.
    # A replica that was restarted is tried again soon, not after the library's backoff of up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Replicas are never behind the proxy that the environment names for the hub.
    ("grpc.enable_http_proxy", 0),
]
#: With this header Triton ends a stream with the status of its error; without it, an error is only a text.
_METADATA = (("triton_grpc_error", "true"),)

#: How Triton's message about a dead process begins.
_DEAD_PROCESS = re.compile(
    r"(Failed to process the request\(s\) for model instance '[\w-]+', message: )?Stub process\b"
)
_RETRY_AFTER = re.compile(r"try again in (\d{1,6}) s\b")
#: What Triton itself says when it stops.
_STOPPING = "Server is stopping"
#: The server ends a text at its deadline; we wait this much longer for its last response.
GRACE_S = 5.0
#: How long the end of a stream is awaited after its last response.
END_LIMIT_S = 1.0


class ReplicaError(Exception):
    """A replica refused a request, failed on it, or cannot be reached. reason: the label in the metrics."""

    reason = "failed"


class Refused(ReplicaError):
    """The request is wrong; no replica would serve it."""

    reason = "invalid"


class ReplicaFull(ReplicaError):
    """The replica takes no request now: it is full.

    retry_after_s: in how many seconds it may take one. is_for_all: it would refuse every other request, too.
    """

    reason = "full"

    def __init__(self, message: str, is_for_all: bool = True) -> None:
        super().__init__(message)
        hint = _RETRY_AFTER.search(message)
        self.retry_after_s = int(hint[1]) if hint else 1
        self.is_for_all = is_for_all


class ReplicaDraining(ReplicaError):
    """The replica drains or stops: it is healthy, but takes no new request and may not finish a running one."""

    reason = "draining"


class ReplicaLost(ReplicaError):
    """The replica, or the process of its public model, cannot be reached."""

    reason = "lost"


class FirstTokenTimeout(ReplicaError):
    """The first response did not come in time; the replica may just be busy."""

    reason = "late"


class DeadlineExceeded(ReplicaError):
    """The text did not end by the request's deadline; the replica may just be busy."""

    reason = "deadline"


class StreamStalled(ReplicaError):
    """The responses stopped; Triton never closes the streams of a killed process."""

    reason = "silent"


#: What the first word of an UNAVAILABLE means (docs/protocol.md, Errors): full_for_salt and busy concern some requests
#: alone. A text without such a code is not from a server that works.
BY_CODE: dict[str, Callable[[str], ReplicaError]] = {
    "full": ReplicaFull,
    "full_for_salt": functools.partial(ReplicaFull, is_for_all=False),
    "busy": functools.partial(ReplicaFull, is_for_all=False),
    "draining": ReplicaDraining,
}
_ERRORS: dict[grpc.StatusCode, type[ReplicaError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: Refused,
    grpc.StatusCode.CANCELLED: ReplicaLost,
    grpc.StatusCode.NOT_FOUND: ReplicaLost,
}


def _never() -> float:
    return -math.inf


class TritonClient:
    """One replica, through a channel of its own."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def close(self) -> None:
        """Close the channel; streams that still run are cancelled."""
        await self._channel.close()

    async def is_ready(self, model: str = MODEL, limit_s: float = 2.0) -> bool:
        """Return whether the replica answers and has loaded a model."""
        try:
            answer = await self._stub.ModelReady(service_pb2.ModelReadyRequest(name=model), timeout=limit_s)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.ready)

    async def stream(
        self,
        inputs: Mapping[str, Any],
        first_limit_s: float,
        silence_limit_s: float,
        request_id: str = "",
        last_sign_s: Callable[[], float] = _never,
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Send one request; yield the outputs of each response. Leaving the iterator cancels the request.

        last_sign_s: when there last was a reason to wait for the request's next response; it is awaited until
        `first_limit_s` after that time, and once there was a response, until `silence_limit_s` after it.

        Raises ReplicaError: FirstTokenTimeout if sending the request or its first response takes longer than
        `first_limit_s`, StreamStalled if a later response takes longer than `silence_limit_s`, DeadlineExceeded if the
        request goes on after its deadline.
        """
        call = self._stub.ModelStreamInfer(metadata=_METADATA, timeout=inputs["timeout_ms"] / 1000 + GRACE_S)
        limit_s = first_limit_s
        too_long: type[ReplicaError] = FirstTokenTimeout
        is_over = False
        try:
            async with asyncio.timeout(limit_s):
                await _send(call, to_request(inputs, request_id))
            while (message := await _read(call, limit_s, last_sign_s)) is not grpc.aio.EOF:
                if message.error_message:
                    is_over = True
                    raise _error(grpc.StatusCode.UNKNOWN, message.error_message)
                if message.infer_response.outputs:
                    limit_s, too_long = silence_limit_s, StreamStalled
                    outputs = to_outputs(message.infer_response)
                    is_over = bool(outputs.get("finish_reason"))
                    yield outputs
        except TimeoutError:
            raise too_long(f"no response for {limit_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise _error(error.code(), error.details() or "") from None
        except asyncio.InvalidStateError:  # a write to a call that has failed; only a read would tell the reason
            raise ReplicaLost("the connection broke") from None
        finally:
            try:
                if is_over:
                    await _await_end(call)
            finally:
                call.cancel()


async def _await_end(call: Any) -> None:
    """Await the end of a stream that is over; Triton logs an error for each that is cancelled just before its end."""
    with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError):
        async with asyncio.timeout(END_LIMIT_S):
            while await call.read() is not grpc.aio.EOF:
                pass


async def _send(call: Any, request: service_pb2.ModelInferRequest) -> None:
    """Send a request; never returns if the peer has vanished and the request exceeds the flow-control window."""
    await call.write(request)
    await call.done_writing()


async def _read(call: Any, limit_s: float, last_sign_s: Callable[[], float]) -> Any:
    """Return the next message; raises TimeoutError if neither it nor a sign of life comes within the limit.

    Not asyncio.wait_for: in Python 3.11 it loses a cancellation that coincides with the message (cpython#86296).
    """
    reading, left_s = asyncio.ensure_future(call.read()), limit_s
    try:
        while not (await asyncio.wait({reading}, timeout=left_s))[0]:
            if (left_s := last_sign_s() + limit_s - time.monotonic()) <= 0:
                raise TimeoutError
        return reading.result()
    finally:
        reading.cancel()


def _error(code: grpc.StatusCode, message: str) -> ReplicaError:
    # Triton reports a dead process with the code of an invalid request (seen with 2.51). Its message may quote the
    # request, so the text is recognised only where no client can have written it.
    if _DEAD_PROCESS.match(message):
        return ReplicaLost(message)
    if code is grpc.StatusCode.UNAVAILABLE:
        return _unavailable(message)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded("no end of the text at the request's deadline")
    return _ERRORS.get(code, ReplicaError)(message or code.name)


def _unavailable(message: str) -> ReplicaError:
    code, _, text = message.partition(": ")
    if text and code in BY_CODE:
        return BY_CODE[code](text)
    return ReplicaDraining(message) if _STOPPING in message else ReplicaLost(message or "UNAVAILABLE")


def to_request(inputs: Mapping[str, Any], request_id: str = "") -> service_pb2.ModelInferRequest:
    """Return the message of a request; a list becomes a tensor of shape (1, n), a scalar one of (1, 1)."""
    request = service_pb2.ModelInferRequest(model_name=MODEL, id=request_id)
    for name, value in inputs.items():
        datatype, values = DATATYPES[name], value if isinstance(value, list) else [value]
        tensor = request.inputs.add(name=name, datatype=datatype, shape=(1, len(values)))
        raw = [item.encode() for item in values] if datatype == "BYTES" else values
        getattr(tensor.contents, _FIELDS[datatype]).extend(raw)
    return request


def to_outputs(response: service_pb2.ModelInferResponse) -> dict[str, Any]:
    """Return a response's outputs by name, as Python values."""
    outputs = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        values = _strings(raw) if output.datatype == "BYTES" else _numbers(output.datatype, raw)
        outputs[output.name] = values if output.name in LISTS else values[0]
    return outputs


def _numbers(datatype: str, raw: bytes) -> list[Any]:
    return list(struct.unpack(f"<{len(raw) // 4}{_CODES[datatype]}", raw))


def _strings(raw: bytes) -> list[str]:
    found = []
    while raw:
        (size,) = struct.unpack_from("<I", raw)
        found.append(raw[4 : 4 + size].decode(errors="replace"))
        raw = raw[4 + size :]
    return found
