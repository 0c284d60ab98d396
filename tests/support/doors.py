"""Two ways to put load on a server from one thread: HTTP `/generate` and gRPC streams, with little work per request.

The client shares the processors with the server, so its cost would be measured as the server's. Therefore every request
is prepared before the load.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import urllib.parse
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.clients import infer_request, outputs_of

NUM_STREAMS = 8


class Said(NamedTuple):
    """The answer to one request: its text, or its error."""

    text: str = ""
    error: str = ""


class Door(Protocol):
    """Sends any number of requests at once; an asynchronous context manager."""

    async def open(self, number: int) -> None:
        """Prepare for `number` requests at once."""

    async def ask(self, number: int) -> Said:
        """Send the prepared request `number` and return its answer; raises OSError for a broken connection."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class HttpDoor:
    """Sends to `/generate`, over connections that are kept and reused."""

    def __init__(self, url: str, requests: Sequence[Mapping[str, Any]]) -> None:
        address = urllib.parse.urlsplit(url)
        self._host, self._port = address.hostname, address.port
        self._sent = [_http_request(json.dumps(request).encode()) for request in requests]
        self._free: list[_Connection] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._free:
            connection.transport.close()

    async def open(self, number: int) -> None:
        """Prepare for `number` requests at once."""
        loop = asyncio.get_running_loop()
        while len(self._free) < number:
            _, connection = await loop.create_connection(_Connection, self._host, self._port)
            self._free.append(connection)

    async def ask(self, number: int) -> Said:
        """Send the prepared request `number` and return its answer; raises OSError for a broken connection."""
        await self.open(1)
        connection = self._free.pop()
        answer = await connection.ask(self._sent[number])
        self._free.append(connection)
        body = json.loads(answer[answer.index(b"{") : answer.rindex(b"}") + 1])
        return Said(body.get("text_output", ""), body.get("error", ""))


def _http_request(body: bytes) -> bytes:
    return (
        b"POST /v2/models/speculative/generate HTTP/1.1\r\nHost: server\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )


class _Connection(asyncio.Protocol):
    """A connection with one request at a time."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def ask(self, request: bytes) -> asyncio.Future[bytes]:
        """Send a request; return the future of the response's bytes."""
        self._received, self._answer = b"", asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, _, body = self._received.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
        if len(body) >= int(length) if length else body.endswith(b"0\r\n\r\n"):
            self._answer.set_result(self._received)

    def connection_lost(self, error: Exception | None) -> None:
        if hasattr(self, "_answer") and not self._answer.done():
            self._answer.set_exception(ConnectionResetError("the server closed the connection"))


class GrpcDoor:
    """Sends over NUM_STREAMS gRPC streams in turn, each on a connection of its own."""

    def __init__(self, url: str, requests: Sequence[Mapping[str, Any]]) -> None:
        self._url = url
        self._requests = [infer_request("speculative", **request) for request in requests]
        self._ids = itertools.count()
        self._waiting: dict[str, asyncio.Future[Said]] = {}

    async def __aenter__(self) -> Self:
        own = [("grpc.use_local_subchannel_pool", 1)]
        self._channels = [grpc.aio.insecure_channel(self._url, options=own) for _ in range(NUM_STREAMS)]
        self._outboxes: list[asyncio.Queue[Any]] = [asyncio.Queue() for _ in self._channels]
        pairs = zip(self._channels, self._outboxes, strict=True)
        self._readers = [asyncio.create_task(self._read(*pair)) for pair in pairs]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for outbox in self._outboxes:
            outbox.put_nowait(None)
        await asyncio.gather(*self._readers)
        for channel in self._channels:
            await channel.close()

    async def open(self, number: int) -> None:
        """Do nothing: the streams are open already."""

    async def ask(self, number: int) -> Said:
        """Send the prepared request `number` and return its answer; raises OSError for a broken connection."""
        request = service_pb2.ModelInferRequest()
        request.CopyFrom(self._requests[number])
        request.id = str(request_id := next(self._ids))
        self._waiting[request.id] = answer = asyncio.get_running_loop().create_future()
        self._outboxes[request_id % NUM_STREAMS].put_nowait(request)
        return await answer

    async def _read(self, channel: Any, outbox: asyncio.Queue[Any]) -> None:
        async def requests() -> AsyncIterator[Any]:
            while request := await outbox.get():
                yield request

        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        async for message in stub.ModelStreamInfer(requests()):
            response, error = message.infer_response, message.error_message
            if (error or response.outputs) and (answer := self._waiting.pop(response.id, None)):
                answer.set_result(Said("" if error else outputs_of(response)["text_output"], error))
