"""The launcher's calls to Triton: readiness and reloading, with the key of the restricted interfaces."""

from __future__ import annotations

import http.client
import json

from launcher.command import KEY_HEADER
from orchestrator.core.errors import ServingError

#: How long Triton may take to say that it is live or ready.
ANSWER_LIMIT_S = 5.0


class AdminError(ServingError):
    """Triton refused or did not answer."""


class NoAnswer(AdminError):
    """Triton did not answer in time."""


class Admin:
    """Administers one server."""

    def __init__(self, host: str, port: int, key: str) -> None:
        self._host, self._port, self._key = host, port, key

    def is_live(self) -> bool:
        """Return whether Triton answers over HTTP."""
        return self._is_ok("/v2/health/live")

    def is_ready(self, model: str = "") -> bool:
        """Return whether a model takes requests, or the server if no model is named.

        Triton keeps calling a model ready even when its process has died (triton#7230).
        """
        return self._is_ok(f"/v2/models/{model}/ready" if model else "/v2/health/ready")

    def reload(self, model: str, limit_s: float) -> None:
        """Unload and load `model`; `load` alone does nothing to a model that counts as loaded.

        The load does not wait for the unload to end: it starts a new process at once, whereas an unload that waits for
        a request of the dead process never ends.

        Raises AdminError if Triton refuses, or does not answer within `limit_s`.
        """
        for action in ("unload", "load"):
            path = f"models/{model}/{action}"
            try:
                status, body = self._request("POST", f"/v2/repository/{path}", limit_s)
                answer = json.loads(body or "{}")
            except TimeoutError:
                raise NoAnswer(f"{path}: no answer for {limit_s:g} s") from None
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise AdminError(f"{path}: {error or type(error).__name__}") from None
            if status != 200:
                raise AdminError(f"{path}: {answer.get('error', status)}")

    def _is_ok(self, path: str) -> bool:
        try:
            return self._request("GET", path, ANSWER_LIMIT_S)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def _request(self, method: str, path: str, limit_s: float) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=limit_s)  # no proxy, unlike urllib
        try:
            connection.request(method, path, b"{}" if method == "POST" else None, {KEY_HEADER: self._key})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()
