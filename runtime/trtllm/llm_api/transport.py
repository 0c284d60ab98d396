"""The LLM API's gRPC service (`trtllm-serve --grpc`) as a client's transport: one event loop streams every request."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
from smg_grpc_proto.generated import trtllm_service_pb2 as pb
from smg_grpc_proto.generated.trtllm_service_pb2_grpc import TrtllmServiceStub

from orchestrator.core.errors import EngineError, RequestError, ServingError, Unavailable, first_line
from runtime.trtllm.transport import Response, ResponseQueue

log = logging.getLogger(__name__)

SHUTDOWN_LIMIT_S = 5.0
#: How often a server that is not ready yet is asked again, and named in the log.
ASK_S, LOG_S = 1.0, 30.0
_OPTIONS = (("grpc.max_send_message_length", 32 << 20), ("grpc.max_receive_message_length", 32 << 20))
_Result = TypeVar("_Result")


@dataclass(frozen=True, eq=False)
class LlmResult:
    """What one message of the stream adds.

    output_token_ids: the new tokens, of the one beam. logprobs: of each of them, if they were requested.
    num_accepted, num_drafted: draft tokens of the whole request, in its last result; 0 where the server does not count.
    """

    output_token_ids: list[list[int]]
    finish_reasons: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    num_accepted: int = 0
    num_drafted: int = 0


class LlmTransport:
    """Implements `runtime.trtllm.transport.Transport`.

    Invariant: every request is answered by a final response, unless it was cancelled; a server that has gone answers
    with Unavailable, and the channel connects again by itself.
    """

    owns_engine = False

    def __init__(self, address: str) -> None:
        self._address = address
        self._ids = itertools.count(1)
        self._responses = ResponseQueue()
        self.responses = self._responses.take
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="llm-api", daemon=True)
        self._thread.start()
        self._stub = self._wait(self._connect(), SHUTDOWN_LIMIT_S)

    def await_server(self, limit_s: float) -> tuple[Any, Any]:
        """Wait until the server is healthy; return its GetServerInfoResponse and GetModelInfoResponse.

        Raises Unavailable when it is not healthy within `limit_s`.
        """
        end_s, logged_s, state = time.monotonic() + limit_s, 0.0, ""
        while True:
            try:
                status = self._ask(self._stub.HealthCheck, pb.HealthCheckRequest()).status
                if status == "OK":
                    break
                state = f"its health is {status!r}"
            except grpc.RpcError as error:
                state = str(_error_of(error, self._address))
            if time.monotonic() >= end_s:
                raise Unavailable(f"trtllm-serve at {self._address} is not ready after {limit_s:.0f} s: {state}")
            if time.monotonic() - logged_s >= LOG_S:
                log.warning("waiting for trtllm-serve at %s: %s", self._address, state)
                logged_s = time.monotonic()
            time.sleep(ASK_S)
        server = self._ask(self._stub.GetServerInfo, pb.GetServerInfoRequest())
        return server, self._ask(self._stub.GetModelInfo, pb.GetModelInfoRequest())

    def _ask(self, method: Any, request: Any) -> Any:
        """Return the answer to a unary call, which begins on the loop's thread as grpc.aio wants."""

        async def call() -> Any:
            return await method(request, timeout=ASK_S)

        return self._wait(call(), 2 * ASK_S)

    def enqueue(self, payload: Any, deadline_s: float) -> int:
        """Begin a generation; payload: a GenerateRequest without an id. deadline_s: unused; the client enforces it."""
        request_id = next(self._ids)
        payload.request_id = f"specserve-{id(self):x}-{request_id}"
        self._loop.call_soon_threadsafe(self._begin, request_id, payload)
        return request_id

    def takes_requests(self) -> bool:
        """Return whether the event loop runs; a server that has gone fails each request by itself."""
        return self._thread.is_alive()

    def cancel(self, request_id: int) -> None:
        """End a generation: the server aborts a request whose call is cancelled; no more responses come."""
        self._loop.call_soon_threadsafe(lambda: (task := self._tasks.get(request_id)) and task.cancel())

    def shut_down(self) -> None:
        """End all generations; an event loop that hangs is abandoned on its thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(SHUTDOWN_LIMIT_S)

    def _wait(self, call: Any, limit_s: float) -> Any:
        return asyncio.run_coroutine_threadsafe(_await(call), self._loop).result(limit_s)

    async def _connect(self) -> Any:
        self._channel = grpc.aio.insecure_channel(self._address, options=_OPTIONS)
        return TrtllmServiceStub(self._channel)

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._until_closing())

    async def _until_closing(self) -> None:
        await self._closing.wait()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._channel.close()

    def _begin(self, request_id: int, request: Any) -> None:
        task = self._loop.create_task(self._stream(request_id, request))
        self._tasks[request_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(request_id, None))

    async def _stream(self, request_id: int, request: Any) -> None:
        """Put a response for each message; cancelling the task cancels the call."""
        last, call = pb.GenerateStreamChunk(), self._stub.Generate(request)
        try:
            async for message in call:
                if message.HasField("complete"):
                    self._responses.put(Response(request_id, _completed(message.complete, last, request.streaming)))
                    return
                if message.chunk.completion_tokens >= request.max_tokens:
                    last = message.chunk  # the counters follow at once, in the last message
                else:
                    tokens = list(message.chunk.token_ids)
                    result = LlmResult([tokens], logprobs=list(message.chunk.logprobs))
                    self._responses.put(Response(request_id, result, is_final=False, has_tokens=bool(tokens)))
            raise EngineError("TensorRT-LLM ended the stream without a last message")
        except Exception as error:
            log.warning("trtllm-serve at %s failed on a request: %s", self._address, first_line(error))
            self._responses.put(Response(request_id, error=_error_of(error, self._address)))
        finally:
            call.cancel()  # a task that is cancelled between two messages does not cancel its call


async def _await(call: Coroutine[Any, Any, _Result]) -> _Result:
    return await call


def _completed(complete: Any, last: Any, is_streamed: bool) -> LlmResult:
    """Return the last result, whose tokens are those that no result had yet."""
    tokens, logprobs = (
        (last.token_ids, last.logprobs) if is_streamed else (complete.output_token_ids, complete.logprobs)
    )
    return LlmResult(
        [list(tokens)],
        [complete.finish_reason],
        list(logprobs),
        complete.spec_accepted_tokens,
        complete.spec_draft_tokens,
    )


def _error_of(error: Exception, address: str) -> ServingError:
    """Return the error of a failed call by its gRPC status (tensorrt_llm/grpc/smg/servicer.py)."""
    if isinstance(error, ServingError):
        return error
    if not isinstance(error, grpc.RpcError):
        return EngineError(f"TensorRT-LLM's answer was not understood: {first_line(error)}")
    details = first_line(error.details() or error.code().name)
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return Unavailable(f"trtllm-serve at {address} cannot be reached: {details}")
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        return RequestError(f"TensorRT-LLM refused the request: {details}")
    return EngineError(f"TensorRT-LLM failed on this request: {details}")
