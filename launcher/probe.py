"""Asks a running server for one token, and reads its metrics port."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence

from orchestrator.core.errors import Draining, QueueFull, SaltQueueFull

#: For how long an answer is reused, so that probes do not become a load.
FRESH_S = 2.0
METRICS_LIMIT_S = 5.0
#: An opener without proxies: the ports are on this machine.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
#: How the errors of a healthy server begin that takes no request now.
_REFUSALS = tuple(f"{kind.code}: " for kind in (QueueFull, SaltQueueFull, Draining))
_INFO = re.compile(r"^spec_engine_info\{(.*)\} ", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_PASSES = re.compile(r'^spec_passes_total\{model="target"\} (\S+)$', re.MULTILINE)


class Probe:
    """Asks each public model for one token over HTTP.

    models: the public models. limit_s: how long a token may take; no answer at all within twice that is silence. A
    busy server is healthy: if the token does not come in time, passes of the target that ran meanwhile count like a
    token, and so does a refusal of a full queue or a drain. A silent model is never healthy.
    """

    def __init__(self, http_url: str, metrics_url: str, models: Sequence[str], limit_s: float) -> None:
        self._http_url, self._metrics_url = http_url, metrics_url
        self._models, self._limit_s = models, limit_s
        self._lock = threading.Lock()
        self._asked_s = -FRESH_S
        self._trouble: str | None = None

    def why_no_token(self) -> str | None:
        """Return in one line why no token can be had, None if all is well; at most one request runs at a time."""
        with self._lock:
            if time.monotonic() - self._asked_s >= FRESH_S:
                self._trouble = next(filter(None, map(self._ask, self._models)), None)
                self._asked_s = time.monotonic()
            return self._trouble

    def _ask(self, model: str) -> str | None:
        """Return why a model is not well, None if it is."""
        before = num_passes(self._metrics_url)
        try:
            error = self._generate(model)
        except TimeoutError:
            return f"no token came: {model} did not answer within {2 * self._limit_s:g} s"
        if not error or error.startswith(_REFUSALS):
            return None
        has_passed = before is not None and (num_passes(self._metrics_url) or 0.0) > before
        return None if has_passed else f"no token came from {model}: {error[:300]}"

    def _generate(self, model: str) -> str:
        """Have a model generate a token; return the error, or why none came. Raises TimeoutError without an answer."""
        body = {"text_input": "a", "max_tokens": 1, "speculation": "none", "timeout_ms": int(self._limit_s * 1000)}
        request = urllib.request.Request(f"{self._http_url}/v2/models/{model}/generate", json.dumps(body).encode())
        try:
            with DIRECT.open(request, timeout=2 * self._limit_s) as response:
                answer = json.loads(response.read())
        except urllib.error.HTTPError as refused:
            with refused:
                return _error_in(refused.read().decode(errors="replace").strip())
        except TimeoutError:
            raise
        except (OSError, ValueError) as failed:
            if isinstance(getattr(failed, "reason", None), TimeoutError):  # of the connection
                raise TimeoutError from None
            return str(failed) or type(failed).__name__
        is_late = answer.get("finish_reason") == "deadline"
        return str(answer.get("error", f"none within {self._limit_s:g} s" if is_late else ""))


def num_passes(metrics_url: str) -> float | None:
    """Return how many passes the target has run, None if that is unknown."""
    found = _PASSES.search(_read(metrics_url))
    return float(found[1]) if found else None


def with_kernels(models: Iterable[str], metrics_url: str) -> list[str]:
    """Return the names of models, each followed by what computes its passes if the metrics port says so."""
    labels = [dict(_LABEL.findall(series)) for series in _INFO.findall(_read(metrics_url))]
    kernels = {one["model"]: one["kernels"] for one in labels if "model" in one and "kernels" in one}
    return [f"{name} ({kernels[name]})" if name in kernels else name for name in models]


def _read(metrics_url: str) -> str:
    """Return the text of a metrics port, "" if it does not answer."""
    try:
        with DIRECT.open(metrics_url, timeout=METRICS_LIMIT_S) as response:
            return str(response.read().decode(errors="replace"))
    except OSError:
        return ""


def _error_in(body: str) -> str:
    """Return the message of an error response; the whole body if it is not Triton's."""
    try:
        return str(json.loads(body)["error"])
    except (ValueError, TypeError, LookupError):
        return body
