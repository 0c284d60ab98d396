"""Reads the bodies of requests: each within limits of size and time, all together within one of memory."""

from __future__ import annotations

import asyncio

from fastapi import Request
from starlette.requests import ClientDisconnect

from gateway.answers import ClientGone
from gateway.errors import Busy, TooLarge, TooSlow, Unavailable, UnsupportedMediaType, abbreviated
from gateway.parsing import Parsed, parse
from gateway.settings import Settings
from gateway.workers import off_loop

#: How many bodies of the greatest allowed length may be held at once.
MAX_LONGEST = 8
#: Bodies up to this length are always read, so that a flood of long ones keeps out no ordinary request.
SHORT_BYTES = 64 << 10
#: At a full deployment, how many bodies are read at once to see whether they are urgent, and for how long each. A small
#: body comes together with its head; waiting longer would serve only clients that hold up the others.
MAX_LOOKS, LOOK_LIMIT_S = 16, 0.25
_PRIORITY = b'"priority"'


class Bodies:
    """Reads bodies, and counts the bytes of those that are being read or parsed."""

    def __init__(self, settings: Settings) -> None:
        self._max_bytes, self._limit_s = settings.max_body_bytes, settings.receive_limit_s
        self._num_bytes = self._num_looks = 0

    async def fields(self, model: type[Parsed], request: Request) -> Parsed:
        """Return the fields of a request; raises ApiError, and stops reading a body that is refused."""
        raw = bytearray()
        try:
            await self._read(request, raw, self._limit_s)
            return await off_loop(parse, model, raw)
        finally:
            self._num_bytes -= len(raw)

    async def urgent_fields(self, model: type[Parsed], request: Request, busy: Busy) -> Parsed:
        """Return the fields of a request that comes to a full deployment if it has a priority; else raise `busy`.

        So that a flood is refused cheaply, only short bodies are read, few at once, and only those with a priority
        are parsed.
        """
        size = request.headers.get("content-length", "")
        if not (size.isdecimal() and int(size) <= SHORT_BYTES) or self._num_looks >= MAX_LOOKS:
            raise busy
        raw = bytearray()
        self._num_looks += 1
        try:
            await self._read(request, raw, LOOK_LIMIT_S)
            if _PRIORITY not in raw:
                raise busy
            return await off_loop(parse, model, raw)
        except TooSlow:
            raise busy from None
        finally:
            self._num_looks -= 1
            self._num_bytes -= len(raw)

    async def _read(self, request: Request, raw: bytearray, limit_s: float) -> None:
        """Append the body to `raw`."""
        _check_media_type(request)
        try:
            async with asyncio.timeout(limit_s):
                async for part in request.stream():
                    raw += part
                    self._num_bytes += len(part)
                    self._check(len(raw))
        except ClientDisconnect:
            raise ClientGone("the client left before it had sent its whole request") from None
        except TimeoutError:
            raise TooSlow(f"the body must arrive within {limit_s:g} s (receive_limit_s)") from None

    def _check(self, num_bytes: int) -> None:
        """Raise TooLarge for a body that is too long, or Unavailable for a long one if too many are held already."""
        if num_bytes > self._max_bytes:
            raise TooLarge(f"the body must be at most {self._max_bytes} bytes (max_body_bytes)")
        max_together = MAX_LONGEST * self._max_bytes
        if num_bytes > SHORT_BYTES and self._num_bytes > max_together:
            raise Unavailable(
                f"the bodies of all requests under way may have {max_together} bytes together "
                f"({MAX_LONGEST} × max_body_bytes); send shorter ones, or this one again",
                retry_after_s=1,
            )


def _check_media_type(request: Request) -> None:
    """Raise UnsupportedMediaType for a body that is not sent as plain JSON.

    A page of any site can make a browser post text or a form to a gateway on its user's machine; to send JSON, the
    browser asks the gateway first (`allowed_origins`).
    """
    sent = request.headers.get("content-type", "")
    if sent.partition(";")[0].strip().lower() != "application/json":
        raise UnsupportedMediaType(f"Content-Type must be application/json, got {abbreviated(sent)}")
    if (encoding := request.headers.get("content-encoding", "identity").strip().lower()) != "identity":
        raise UnsupportedMediaType(f"Content-Encoding must be absent or identity, got {abbreviated(encoding)}")
