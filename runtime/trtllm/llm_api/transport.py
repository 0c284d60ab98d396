"""The LLM API as a client's transport: one event loop streams every request."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from dataclasses import dataclass
from typing import Any

from runtime.trtllm.transport import Response, ResponseQueue, failed_response

log = logging.getLogger(__name__)

SHUTDOWN_LIMIT_S = 5.0
ENDED = "the LLM API's event loop or its workers have ended"


@dataclass(frozen=True, eq=False)
class LlmResult:
    """One streamed output. output_token_ids: only the new tokens, of its one beam."""

    output_token_ids: list[list[int]]
    decoding_iter: int
    finish_reasons: list[str]


class LlmTransport:
    """Implements `runtime.trtllm.transport.Transport`.

    Invariant: every request is answered by a final response, unless it was cancelled.
    """

    owns_engine = True

    def __init__(self, llm: Any) -> None:
        """llm: a tensorrt_llm.llmapi.LLM."""
        self.llm = llm
        self._ids = itertools.count(1)
        self._responses = ResponseQueue()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="llm-api", daemon=True)
        self._thread.start()

    def enqueue(self, payload: dict[str, Any], deadline_s: float) -> int:
        """Begin a generation with these arguments of generate_async; raises when the library takes no requests.

        deadline_s: unused; the client enforces it.
        """
        self._check_alive()
        request_id = next(self._ids)
        self._loop.call_soon_threadsafe(self._begin, request_id, payload)
        return request_id

    def takes_requests(self) -> bool:
        """Return whether the library takes requests: its loop runs, and its workers have not ended.

        Inferred: an LLM without an executor, or whose executor is shut down, raises "LLM is shutting down" forever.
        """
        if not self._thread.is_alive():
            return False
        if not hasattr(self.llm, "_executor"):  # another release may name it differently
            return True
        return self.llm._executor is not None and not self.llm._executor.is_shutdown()

    def responses(self, timeout_s: float) -> list[Response]:
        """Return the responses that have come; raises when no more can come."""
        self._check_alive()
        return self._responses.take(timeout_s)

    def cancel(self, request_id: int) -> None:
        """End a generation; no more responses come."""
        self._loop.call_soon_threadsafe(lambda: (task := self._tasks.get(request_id)) and task.cancel())

    def shut_down(self) -> None:
        """End all generations and the library's processes; an event loop that hangs is abandoned on its thread."""
        try:
            if self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._closing.set)
                self._thread.join(SHUTDOWN_LIMIT_S)
            if self._thread.is_alive():
                log.warning("requests of the LLM API did not end in %.0f s", SHUTDOWN_LIMIT_S)
        finally:  # even if they did not: the library's processes hold the GPU
            self.llm.shutdown()

    def _check_alive(self) -> None:
        if not self.takes_requests():
            raise RuntimeError(ENDED)

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._until_closing())

    async def _until_closing(self) -> None:
        await self._closing.wait()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, request_id: int, arguments: dict[str, Any]) -> None:
        task = self._loop.create_task(self._stream(request_id, arguments))
        self._tasks[request_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(request_id, None))

    async def _stream(self, request_id: int, arguments: dict[str, Any]) -> None:
        """Put a response for each output; cancelling the task aborts its request."""
        output = None
        try:
            # The library makes an asynchronous queue only inside a running loop, as here.
            output = self.llm.generate_async(streaming=True, **arguments)
            async for step in output:
                self._responses.put(_read(request_id, step))
        except asyncio.CancelledError:
            if output is not None:
                output.abort()
        except Exception as error:
            log.exception("the LLM API failed on a request")
            if self.takes_requests():  # otherwise the whole library has failed, and `responses` raises
                self._responses.put(failed_response(request_id, error))


def _read(request_id: int, step: Any) -> Response:
    if error := getattr(step, "error", None):
        return failed_response(request_id, error)
    completion = step.outputs[0]
    tokens = list(completion.token_ids_diff)
    reasons = [completion.finish_reason] if completion.finish_reason else []
    return Response(
        request_id, LlmResult([tokens], int(step.decoding_iter), reasons), bool(step.finished), bool(tokens)
    )
