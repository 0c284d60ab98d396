"""One stream of a replica: a cancellation ends it whenever it comes."""

import asyncio
import contextlib
import struct
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from gateway.triton import ReplicaError, TritonClient
from tests.support.standin_replica import StandInReplica

pytestmark = pytest.mark.unit


class CallThatIsCancelledAtItsAnswer:
    """A gRPC call whose reader is cancelled just when the first message is there (cpython#86296)."""

    def __init__(self) -> None:
        self.reader: asyncio.Task[None] | None = None

    async def write(self, request: Any) -> None: ...

    async def done_writing(self) -> None: ...

    async def read(self) -> Any:
        await asyncio.sleep(0)
        if self.reader is None:
            await asyncio.Event().wait()
        reader, self.reader = self.reader, None
        asyncio.get_running_loop().call_soon(reader.cancel)
        return service_pb2.ModelStreamInferResponse()

    def cancel(self) -> None: ...


def test_a_cancellation_that_comes_with_a_message_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        call, client = CallThatIsCancelledAtItsAnswer(), TritonClient("127.0.0.1:1")
        monkeypatch.setattr(client._stub, "ModelStreamInfer", lambda **_: call)

        async def read_all() -> None:
            async for _ in client.stream({"timeout_ms": 60_000}, 60, 60):
                pass

        call.reader = task = asyncio.create_task(read_all())
        await asyncio.wait({task}, timeout=2)
        was_cancelled = task.cancelled()
        task.cancel()
        await client.close()
        assert was_cancelled

    asyncio.run(test())


def test_no_proxy_is_between_the_gateway_and_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica is found where it is, though the environment names a proxy."""

    async def test() -> None:
        async with StandInReplica() as replica:
            for name in ("http_proxy", "https_proxy", "grpc_proxy"):
                monkeypatch.setenv(name, "http://127.0.0.1:1")
            monkeypatch.delenv("no_proxy", raising=False)
            monkeypatch.delenv("no_grpc_proxy", raising=False)
            client = TritonClient(replica.address)
            assert await client.is_ready()
            await client.close()

    asyncio.run(test())


class CallThatEndsAfterItsAnswer:
    """A gRPC call whose end comes a moment after its only message. was_cancelled: before that."""

    def __init__(self, message: service_pb2.ModelStreamInferResponse) -> None:
        self.messages, self.has_ended, self.was_cancelled = [message], False, False

    async def write(self, request: Any) -> None: ...

    async def done_writing(self) -> None: ...

    async def read(self) -> Any:
        if self.messages:
            return self.messages.pop()
        await asyncio.sleep(0.01)
        self.has_ended = True
        return grpc.aio.EOF

    def cancel(self) -> None:
        self.was_cancelled |= not self.has_ended


def test_a_stream_that_is_over_is_not_cancelled_before_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 2.51 logs an error for each that is."""
    refusal = service_pb2.ModelStreamInferResponse(error_message="top_p must be in 0..1 (input top_p)")
    last = service_pb2.ModelStreamInferResponse()
    last.infer_response.outputs.add(name="finish_reason", datatype="BYTES", shape=[1, 1])
    last.infer_response.raw_output_contents.append(struct.pack("<I", 4) + b"stop")

    async def test(message: service_pb2.ModelStreamInferResponse) -> None:
        call, client = CallThatEndsAfterItsAnswer(message), TritonClient("127.0.0.1:1")
        monkeypatch.setattr(client._stub, "ModelStreamInfer", lambda **_: call)
        with contextlib.suppress(ReplicaError):
            async with contextlib.aclosing(client.stream({"timeout_ms": 60_000}, 60, 60)) as responses:
                async for _ in responses:
                    break
        await client.close()
        assert call.has_ended and not call.was_cancelled

    for message in (refusal, last):
        asyncio.run(test(message))
