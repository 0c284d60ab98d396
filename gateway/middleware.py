"""Around every request: id, key, counts, duration, a log line. Pure ASGI, so that it lasts until a stream ends."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from typing import TYPE_CHECKING

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect

from gateway.errors import ApiError, Unauthorized, UnknownUrl
from gateway.keys import ApiKeys
from gateway.metrics import Metrics

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: The endpoints that are counted and logged; they need an API key if any are set.
COUNTED = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize", "/playground/methods"}
)
#: The endpoints that need a key; the metrics do because they show the replicas' addresses.
GUARDED = COUNTED | {"/metrics"}
REQUEST_ID = "X-Request-Id"
_ID = re.compile(r"[!-~]{1,128}")

log = logging.getLogger(__name__)


class Guard:
    """Gives each request an id, refuses those without a valid key, measures, and ends those that nobody reads."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, metrics: Metrics, send_limit_s: float) -> None:
        self._app, self._keys, self._metrics, self._send_limit_s = app, keys, metrics, send_limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers, path = Headers(scope=scope), scope["path"]
        endpoint = "/v1/models" if path.startswith("/v1/models/") else path
        given = headers.get(REQUEST_ID, "")
        request_id = given if _ID.fullmatch(given) else secrets.token_hex(16)
        scope.setdefault("state", {})["request_id"] = request_id
        began_s, status, key_label = time.monotonic(), 499, ""  # for a client that leaves before its answer begins

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await self._send(send, message)

        is_counted = endpoint in COUNTED
        self._metrics.running.inc(is_counted)
        try:
            # Starlette's patterns end in `$`, which also matches before a last newline: such a path would be served,
            # but without a key, since GUARDED does not contain it.
            if path.endswith("\n"):
                raise UnknownUrl(f"no such endpoint: {scope['method']} {path!r}")
            if endpoint in GUARDED:
                scope["state"]["api_key"] = key = self._keys.key_in(headers.get("authorization", ""))
                scope["state"]["key_label"] = key_label = self._keys.label(key)
            return await self._app(scope, receive, observed)
        except (Unauthorized, UnknownUrl) as error:
            return await to_response(error)(scope, receive, observed)
        except ClientDisconnect:
            status = 499
        except Exception:
            status = 500
            raise
        finally:
            self._metrics.running.dec(is_counted)
            if is_counted:
                self._metrics.requests.labels(endpoint, status, key_label).inc()
                self._observe(scope["method"], endpoint, status, time.monotonic() - began_s, request_id)

    async def _send(self, send: Send, message: Message) -> None:
        """Send a part of a response; raises ClientDisconnect if the client has not made room for it in time."""
        try:
            async with asyncio.timeout(self._send_limit_s):
                await send(message)  # waits while the client lags behind by more than the buffers hold
        except TimeoutError:
            log.info("a client read nothing for %g s: its request ends", self._send_limit_s)
            raise ClientDisconnect from None

    def _observe(self, method: str, endpoint: str, status: int, seconds: float, request_id: str) -> None:
        self._metrics.request_seconds.labels(endpoint).observe(seconds)
        log.info("%s %s %d %.3f s, request %s", method, endpoint, status, seconds, request_id)


def to_response(error: ApiError) -> JSONResponse:
    """Return an error as a response."""
    return JSONResponse(error.body(), error.status, error.headers())
