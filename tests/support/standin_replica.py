"""A stand-in for a replica: Triton's gRPC service over a "model" whose token is a hash of seed and position.

It continues `generated_ids` as docs/protocol.md says (A text that another server began), and on demand fails as Triton
does: with a status, an early end, or silence.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from gateway.triton import MODEL

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def token_at(seed: int, position: int) -> int:
    """Return the id that the model generates at a position: 1..26, the letters of the tiny tokenizer."""
    return 1 + hashlib.sha256(f"{seed} {position}".encode()).digest()[0] % 26


def text_of(seed: int, num_tokens: int) -> str:
    """Return the undisturbed text of a seed."""
    return "".join(LETTERS[token_at(seed, position) - 1] for position in range(num_tokens))


@dataclass
class Fault:
    """What a replica does after `after` tokens of a stream: end with a status or without one, or fall silent.

    pause_s: if not 0, it is silent for this long and then goes on, as a preempted sequence does. delay_s: if not 0, it
    is silent for this long and then ends, as one that waits in a queue in vain.
    not_before: what it first waits for, as a request does that waits in a queue.
    """

    after: int
    code: grpc.StatusCode | None = grpc.StatusCode.UNAVAILABLE
    message: str = "gone"
    is_silent: bool = False
    pause_s: float = 0.0
    delay_s: float = 0.0
    not_before: asyncio.Event | None = None


@dataclass
class StandInReplica(service_pb2_grpc.GRPCInferenceServiceServicer):
    """One replica. faults: one for each of its next streams. requests, ids: of the streams so far.

    pace_s: time between two tokens. script: if not empty, the pieces of each text, which then ends with `stop`.
    """

    faults: list[Fault | None] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    is_up: bool = True
    pace_s: float = 0.0
    script: list[str] = field(default_factory=list)
    num_cancelled: int = 0
    address: str = ""
    on_request: Callable[[], None] = lambda: None

    async def __aenter__(self) -> StandInReplica:
        self._server = grpc.aio.server()
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.stop(0)

    async def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        return service_pb2.ModelReadyResponse(ready=self.is_up)

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        async for request in requests:
            inputs = _inputs(request)
            self.requests.append(inputs)
            self.ids.append(request.id)
            self.on_request()
            fault = self.faults.pop(0) if self.faults else None
            try:
                async for response in self._responses(inputs, fault, context):
                    yield response
            except (asyncio.CancelledError, GeneratorExit):  # the latter if it is cancelled while it sends a response
                self.num_cancelled += 1
                raise

    async def _responses(self, inputs: dict[str, Any], fault: Fault | None, context: Any) -> AsyncIterator[Any]:
        begun, total = len(inputs.get("generated_ids", [])), len(self.script) or inputs["max_tokens"][0]
        for position in range(begun, total):
            if fault and position - begun == fault.after:
                if fault.not_before:
                    await fault.not_before.wait()
                await asyncio.sleep(60 if fault.is_silent else fault.pause_s or fault.delay_s)
                if not fault.pause_s:
                    if fault.code is not None:
                        await context.abort(fault.code, fault.message)
                    return
            await asyncio.sleep(self.pace_s)
            token = token_at(inputs["seed"][0], position)
            outputs: dict[str, Any] = {
                "text_output": self.script[position] if self.script else LETTERS[token - 1],
                "output_ids": token,
                "step_lengths": 1,
                "step_draft_tokens": 2,
                "step_accepted_tokens": 0,
            }
            if position == total - 1:
                outputs |= {"finish_reason": "stop" if self.script else "length", "num_input_tokens": 3}
            yield service_pb2.ModelStreamInferResponse(infer_response=_response(outputs))


def _inputs(request: Any) -> dict[str, Any]:
    assert request.model_name == MODEL
    found: dict[str, Any] = {}
    for tensor in request.inputs:
        (values,) = [list(getattr(tensor.contents, kind.name)) for kind, _ in tensor.contents.ListFields()] or [[]]
        found[tensor.name] = [value.decode() if isinstance(value, bytes) else value for value in values]
        assert list(tensor.shape) == [1, len(values)]
    return found


def _response(outputs: dict[str, Any]) -> Any:
    response = service_pb2.ModelInferResponse(model_name=MODEL)
    for name, value in outputs.items():
        raw = value.encode() if isinstance(value, str) else None
        response.outputs.add(name=name, datatype="BYTES" if raw is not None else "INT32", shape=[1, 1])
        response.raw_output_contents.append(
            struct.pack("<I", len(raw)) + raw if raw is not None else struct.pack("<i", value)
        )
    return response
