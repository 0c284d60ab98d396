"""Errors as OpenAI's API shows them: a status, and a body with message, type, param and code."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

MAX_SHOWN = 100


class ApiError(Exception):
    """An error reported to the client; the class attributes are OpenAI's words for it.

    param: the field of the request that is wrong. retry_after_s: in how many seconds a retry may succeed.
    """

    status = 500
    type = "server_error"
    code: str | None = "internal_error"
    more_headers: Mapping[str, str] = MappingProxyType({})

    def __init__(self, message: str, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """Return the body of the response."""
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Return the headers of the response."""
        retry = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return {**self.more_headers, **retry}


class BadRequest(ApiError):
    """The request is wrong."""

    status, type, code = 400, "invalid_request_error", "invalid_value"


class ContextTooLong(BadRequest):
    """The prompt leaves no room for a token in the target's context."""

    code = "context_length_exceeded"


class UnknownField(BadRequest):
    """The request has a field that the gateway does not know."""

    code = "unknown_parameter"


class Unauthorized(ApiError):
    """The API key is missing or wrong."""

    status, type, code = 401, "invalid_request_error", "invalid_api_key"
    more_headers = MappingProxyType({"WWW-Authenticate": "Bearer"})


class UnknownUrl(ApiError):
    """There is no such endpoint."""

    status, type, code = 404, "invalid_request_error", "unknown_url"


class ModelNotFound(ApiError):
    """The request names a model that is not served here."""

    status, type, code = 404, "invalid_request_error", "model_not_found"


class TooLarge(ApiError):
    """The body is longer than allowed."""

    status, type, code = 413, "invalid_request_error", "request_too_large"


class UnsupportedMediaType(ApiError):
    """The body is not sent as JSON."""

    status, type, code = 415, "invalid_request_error", "unsupported_media_type"


class TooSlow(ApiError):
    """The client has not sent its request in time; the rest of it is not awaited."""

    status, type, code = 408, "invalid_request_error", "request_timeout"
    more_headers = MappingProxyType({"Connection": "close"})


class Busy(ApiError):
    """Every replica is full."""

    status, type, code = 429, "rate_limit_error", "server_busy"


class Unavailable(ApiError):
    """No replica can be reached."""

    status, type, code = 503, "server_error", "unavailable"


class Failed(ApiError):
    """A replica failed on the request, and no other one could serve it."""


def abbreviated(value: object) -> str:
    """Return a value as an error message shows it: shortened, since it may be a whole prompt."""
    return _shortened(repr(value))


def abbreviated_json(value: object) -> str:
    """Return a value of a JSON document as an error message shows it: as JSON, shortened."""
    return _shortened(json.dumps(value))


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint at the known name most similar to `name`, or "" if nothing is similar."""
    matches = difflib.get_close_matches(name[:MAX_SHOWN], list(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""
