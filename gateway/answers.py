"""How a job is answered: as one body, or as a stream of events that never falls silent; and what ends it early."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from typing import TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from gateway.errors import ApiError
from gateway.jobs import DONE, Job, event

#: A server-sent-event comment, which every client skips: proxies and clients end streams that fall silent.
PING = ": ping\n\n"
Result = TypeVar("Result")


class ClientGone(ApiError):
    """Nobody reads the response; the status is only for the log and the metrics."""

    status, type, code = 499, "client_error", "client_closed_request"


async def answer(request: Request, stream: bool, job: Job, ping_interval_s: float) -> Response:
    """Return the response of a job; raises ApiError if the job fails before the response begins."""
    if not stream:
        body = await _unless_gone(request, job.response())
        return await asyncio.to_thread(JSONResponse, body)  # it may be long: 32 texts, each with all log-probabilities
    # The status is sent with the first event or ping, so that a request that is refused before it gets an error status.
    events = with_pings(job.events(), ping_interval_s)
    first = await _unless_gone(request, anext(events))

    async def all_events() -> AsyncIterator[str]:
        async with contextlib.aclosing(events):
            yield first
            try:
                async for event_or_ping in events:
                    yield event_or_ping
            except ApiError as error:
                yield event(error.body()) + DONE

    return StreamingResponse(all_events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def with_pings(events: AsyncGenerator[str, None], interval_s: float) -> AsyncGenerator[str, None]:
    """Yield the events, and PING for each interval without one."""
    coming = asyncio.ensure_future(anext(events))
    try:
        while True:
            if not (await asyncio.wait({coming}, timeout=interval_s))[0]:
                yield PING
                continue
            try:
                found = coming.result()
            except StopAsyncIteration:
                return
            yield found
            coming = asyncio.ensure_future(anext(events))
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
        await events.aclose()


async def _unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """Await work; cancel it when the client disconnects. The body must have been read."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone("the client has gone")
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
