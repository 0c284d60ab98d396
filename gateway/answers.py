"""How a job is answered: as one body, or as a stream of events, kept alive by pings; and what ends it early."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from typing import TYPE_CHECKING, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from gateway.errors import ApiError
from gateway.jobs import DONE, Job, event
from gateway.workers import off_loop

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

#: A server-sent-event comment, which every client skips: proxies and clients end streams that fall silent.
PING = ": ping\n\n"
#: The header that names the fields of a request that change nothing.
IGNORED_FIELDS = "X-Ignored-Fields"
Result = TypeVar("Result")


class ClientGone(ApiError):
    """Nobody reads the response; the status is only for the log and the metrics."""

    status, type, code = 499, "client_error", "client_closed_request"


async def answer(request: Request, is_streamed: bool, job: Job, ping_interval_s: float) -> Response:
    """Return the response of a job; raises ApiError if the job fails before the response begins."""
    headers = {IGNORED_FIELDS: ", ".join(job.ignored)} if job.ignored else {}
    if not is_streamed:
        body = await _unless_gone(request, job.response())
        # A body may be long: 32 texts, each with all log-probabilities.
        return await off_loop(JSONResponse, body, headers=headers)
    # The status is sent with the first event or ping, so that a request that is refused before it gets an error status.
    events = with_pings(job.events(), ping_interval_s)
    first = await _unless_gone(request, anext(events))
    return EventStream(first, events, headers)


class EventStream(StreamingResponse):
    """A response of events, of which the first has already arrived; the events are closed with the response."""

    def __init__(self, first: str, others: AsyncGenerator[str, None], headers: Mapping[str, str]) -> None:
        self._others = others
        # nginx would otherwise collect events before it passes them on.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers}
        super().__init__(self._all(first), media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        # If the client leaves while an event is being sent, Starlette requests no further one and does not close them.
        async with contextlib.aclosing(self._others):
            await super().__call__(scope, receive, send)

    async def _all(self, first: str) -> AsyncIterator[str]:
        yield first
        try:
            async for event_or_ping in self._others:
                yield event_or_ping
        except ApiError as error:
            yield event(error.body()) + DONE


async def with_pings(events: AsyncGenerator[str, None], interval_s: float) -> AsyncGenerator[str, None]:
    """Yield the events, and PING for each interval without one."""
    pending = asyncio.ensure_future(anext(events))
    try:
        while True:
            if not (await asyncio.wait({pending}, timeout=interval_s))[0]:
                yield PING
                continue
            try:
                received = pending.result()
            except StopAsyncIteration:
                return
            yield received
            pending = asyncio.ensure_future(anext(events))
    finally:
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
        await events.aclose()


async def _unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """Await work; cancel it when the client disconnects. The body must have been read."""
    task = asyncio.ensure_future(work)
    disconnected = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone("the client has gone")
        return task.result()
    finally:
        disconnected.cancel()
        task.cancel()
        await asyncio.gather(task, disconnected, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
