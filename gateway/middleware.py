"""Around every request: API keys, counts, durations. Pure ASGI, so that it sees a stream to its end."""

from __future__ import annotations

import hmac
import time
from typing import TYPE_CHECKING

from fastapi.responses import JSONResponse

from gateway.errors import ApiError, Unauthorized
from gateway.metrics import Metrics

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: The endpoints that need an API key where there are some; they are counted, too.
GUARDED = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize", "/playground/methods"}
)


class Guard:
    """Refuses requests without a valid key, and measures the others. keys: empty = no key is needed."""

    def __init__(self, app: ASGIApp, keys: frozenset[bytes], metrics: Metrics) -> None:
        self._app, self._keys, self._metrics = app, keys, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        path = scope.get("path", "")
        endpoint = "/v1/models" if path.startswith("/v1/models/") else path
        if scope["type"] != "http" or endpoint not in GUARDED:
            return await self._app(scope, receive, send)
        began_s, status = time.monotonic(), 499  # of a client that has gone before there was an answer

        async def observed(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            with self._metrics.running.track_inprogress():
                self._check_key(dict(scope["headers"]).get(b"authorization", b"").decode("latin-1"))
                return await self._app(scope, receive, observed)
        except Unauthorized as error:
            return await to_response(error)(scope, receive, observed)
        finally:
            self._metrics.requests.labels(endpoint, status).inc()
            self._metrics.request_seconds.labels(endpoint).observe(time.monotonic() - began_s)

    def _check_key(self, header: str) -> None:
        """Raise Unauthorized unless the header brings one of the keys, or there are none."""
        scheme, _, key = header.partition(" ")
        is_known = any(hmac.compare_digest(key.strip().encode(), known) for known in self._keys)
        if self._keys and not (scheme.lower() == "bearer" and is_known):
            raise Unauthorized("a valid API key is needed: Authorization: Bearer KEY")


def to_response(error: ApiError) -> JSONResponse:
    """Return an error as a response."""
    return JSONResponse(error.body(), error.status, error.headers())
