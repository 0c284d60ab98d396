"""An LLM as the executor that `runtime.trtllm.executor.client` awaits: one event loop, in which every request is streamed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

log = logging.getLogger(__name__)

SHUTDOWN_LIMIT_S = 5.0
ENDED = "the LLM API's event loop or its workers have ended"


@dataclass(frozen=True, eq=False)
class LlmRequest:
    """ids: all committed tokens. params: a SamplingParams. cache_salt: "" = none."""

    ids: Sequence[int]
    params: Any
    cache_salt: str = ""


@dataclass(frozen=True, eq=False)
class LlmResult:
    """What one streamed output brought. output_token_ids: of the one beam, the new tokens alone."""

    output_token_ids: list[list[int]]
    is_final: bool
    decoding_iter: int
    finish_reasons: list[str]


@dataclass(frozen=True, eq=False)
class LlmResponse:
    """A result, or an error in the library's words."""

    request_id: int
    result: LlmResult
    error_msg: str = ""

    def has_error(self) -> bool:
        """True for an error."""
        return bool(self.error_msg)


class _Unknown:
    """Stands for an executor that cannot be asked."""

    def is_shutdown(self) -> bool:
        """Return False."""
        return False


_UNKNOWN = _Unknown()


class LlmExecutor:
    """The part of the executor's surface that the line uses.

    Invariant: every request is answered by a final response, but for one that was cancelled.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._ids = itertools.count(1)
        self._responses: queue.SimpleQueue[LlmResponse] = queue.SimpleQueue()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="llm-api", daemon=True)
        self._thread.start()

    def enqueue_request(self, request: LlmRequest) -> int:
        """Hand a request over and return its id; raises when nothing can come of it any more."""
        if not self.can_enqueue_requests():
            raise RuntimeError(ENDED)
        number = next(self._ids)
        self._loop.call_soon_threadsafe(self._begin, number, request)
        return number

    def can_enqueue_requests(self) -> bool:
        """Tell whether the library would take a request: its loop runs, and its workers have not ended.

        Inferred: an LLM without an executor, or whose executor is shut down, raises "LLM is shutting down" for ever.
        """
        executor = getattr(self._llm, "_executor", _UNKNOWN)
        return self._thread.is_alive() and executor is not None and not executor.is_shutdown()

    def await_responses(self, timeout: timedelta) -> list[LlmResponse]:
        """Return what has come, waiting for a first one no longer than `timeout`; raises when no more can come."""
        if not self.can_enqueue_requests():
            raise RuntimeError(ENDED)
        found: list[LlmResponse] = []
        try:
            found.append(self._responses.get(timeout=max(timeout.total_seconds(), 1e-4)))
            while True:
                found.append(self._responses.get_nowait())
        except queue.Empty:
            return found

    def cancel_request(self, request_id: int) -> None:
        """End a request; nothing more comes of it."""
        self._loop.call_soon_threadsafe(self._cancel, request_id)

    def shutdown(self) -> None:
        """End all requests and the library's own processes."""
        try:
            self._end_loop()
        finally:  # whatever the loop does: the library's processes hold the GPU
            self._llm.shutdown()

    def _end_loop(self) -> None:
        """End the loop; one that does not end is left behind, its thread is a daemon."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(SHUTDOWN_LIMIT_S)
        if self._thread.is_alive():
            log.warning("requests of the LLM API did not end in %.0f s", SHUTDOWN_LIMIT_S)

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._until_closing())

    async def _until_closing(self) -> None:
        await self._closing.wait()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, number: int, request: LlmRequest) -> None:
        task = self._loop.create_task(self._stream(number, request))
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    def _cancel(self, number: int) -> None:
        if task := self._tasks.get(number):
            task.cancel()

    async def _stream(self, number: int, request: LlmRequest) -> None:
        """Put a response for each output; a task that is cancelled aborts its request."""
        salt = {"cache_salt": request.cache_salt} if request.cache_salt else {}
        output = None
        try:
            # The library makes an asynchronous queue only where a loop runs: here.
            output = self._llm.generate_async(list(request.ids), request.params, streaming=True, **salt)
            async for step in output:
                self._responses.put(_response(number, step))
        except asyncio.CancelledError:
            if output is not None:
                output.abort()
        except Exception as error:
            log.exception("the LLM API failed on a request")
            if not self.can_enqueue_requests():
                return  # not this request's failure: whoever awaits responses is told
            self._responses.put(LlmResponse(number, _NOTHING, str(error) or type(error).__name__))


_NOTHING = LlmResult([[]], True, 0, [])


def _response(number: int, step: Any) -> LlmResponse:
    completion = step.outputs[0]
    reasons = [completion.finish_reason] if completion.finish_reason else []
    result = LlmResult([list(completion.token_ids_diff)], bool(step.finished), int(step.decoding_iter), reasons)
    return LlmResponse(number, result, getattr(step, "error", None) or "")
