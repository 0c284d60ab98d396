"""A liveness probe that has the whole server generate one token, and asks whether gRPC answers."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from typing import Protocol

from launcher.engines import DIRECT, num_passes
from orchestrator.core.errors import Draining, QueueFull, SaltQueueFull

#: How long a token may take, and for how long an answer is reused, so that probes do not become a load.
LIMIT_S, FRESH_S = 10.0, 2.0
METRICS_LIMIT_S = 2.0
_SILENT = f"no token came: the server did not answer within {LIMIT_S + 1:g} s"
_REQUEST = {"text_input": "a", "max_tokens": 1, "speculation": "none", "timeout_ms": int(LIMIT_S * 1000)}
#: How the errors of a healthy server begin that takes no request now.
_HEALTHY_REFUSALS = tuple(f"{kind.code}: " for kind in (QueueFull, SaltQueueFull, Draining))


class Frontend(Protocol):
    """A frontend of the server that answers without the models."""

    def silent_method(self) -> str | None:
        """Return a method whose calls are not answered in time, None if all are."""


class Probe:
    """Asks the public model for one token over HTTP, and the gRPC frontend, if it is given, for answers.

    A busy server is healthy: if the token does not come in time, passes that ran meanwhile count like a token. A
    frontend that does not answer is not: it needs no model for that.
    """

    def __init__(self, http_url: str, metrics_url: str, frontend: Frontend | None = None) -> None:
        self._url, self._metrics_url = f"{http_url}/v2/models/speculative/generate", metrics_url
        self._frontend = frontend
        self._lock = threading.Lock()
        self._asked_s = -FRESH_S
        self._trouble: str | None = None

    def why_no_token(self) -> str | None:
        """Return in one line why no token can be had, None if all is well; at most one request runs at a time."""
        with self._lock:
            if time.monotonic() - self._asked_s >= FRESH_S:
                self._trouble = self._ask_frontend() or self._ask_for_token()
                self._asked_s = time.monotonic()
            return self._trouble

    def is_silent(self) -> bool:
        """Return whether a request for a token got no answer at all, not even an error."""
        return self.why_no_token() == _SILENT

    def num_passes(self) -> float | None:
        """Return how many passes the target has run, None if that is unknown."""
        return num_passes(self._metrics_url, METRICS_LIMIT_S)

    def _ask_frontend(self) -> str | None:
        method = self._frontend and self._frontend.silent_method()
        return f"gRPC does not answer: {method} got no answer within {LIMIT_S:g} s" if method else None

    def _ask_for_token(self) -> str | None:
        before = self.num_passes()
        trouble = self._generate()
        if trouble and before is not None and (self.num_passes() or 0.0) > before:
            return None
        return trouble

    def _generate(self) -> str | None:
        request = urllib.request.Request(self._url, json.dumps(_REQUEST).encode())
        try:
            with DIRECT.open(request, timeout=LIMIT_S + 1) as response:
                error = json.loads(response.read()).get("error", "")
        except urllib.error.HTTPError as refused:
            with refused:
                error = _error_in(refused.read().decode(errors="replace").strip())
        except TimeoutError:
            return _SILENT
        except (OSError, ValueError) as failed:
            error = str(failed) or type(failed).__name__
        if not error or error.startswith(_HEALTHY_REFUSALS):
            return None
        return f"no token came: {error[:300]}"


def _error_in(body: str) -> str:
    """Return the message of an error response; the whole body if it is not Triton's."""
    try:
        return str(json.loads(body)["error"])
    except (ValueError, TypeError, LookupError):
        return body
