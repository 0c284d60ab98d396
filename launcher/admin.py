"""Triton's HTTP door as the launcher needs it: readiness and reloading, with the key of the restricted interfaces."""

from __future__ import annotations

import http.client
import json
from typing import Any

from launcher.command import KEY_HEADER
from orchestrator.core.errors import ServingError


class AdminError(ServingError):
    """Triton refused or did not answer."""


class Admin:
    """One server's administration."""

    def __init__(self, host: str, port: int, key: str) -> None:
        self._host, self._port, self._key = host, port, key

    def server_ready(self) -> bool:
        """Tell whether the server takes requests."""
        return self._status("GET", "/v2/health/ready") == 200

    def model_ready(self, model: str) -> bool:
        """Tell whether `model` takes requests; a model whose stub has died says yes for ever (triton#7230)."""
        return self._status("GET", f"/v2/models/{model}/ready") == 200

    def reload(self, model: str, limit_s: float) -> None:
        """Unload and load `model`; `load` alone changes nothing on a model that counts as loaded.

        The load does not wait for the end of the unload: it gets a new process at once, while an unload that still has
        a request of the dead process to finish never ends.

        Raises:
            AdminError: Triton said no, or not within `limit_s`.
        """
        self._post(f"models/{model}/unload", limit_s)
        self._post(f"models/{model}/load", limit_s)

    def _post(self, path: str, limit_s: float) -> Any:
        try:
            status, body = self._ask("POST", f"/v2/repository/{path}", limit_s)
            answer = json.loads(body or "{}")
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise AdminError(f"{path}: {error or type(error).__name__}") from None
        if status != 200:
            raise AdminError(f"{path}: {answer.get('error', status)}")
        return answer

    def _status(self, method: str, path: str) -> int:
        try:
            return self._ask(method, path, 5.0)[0]
        except (OSError, http.client.HTTPException):
            return 0

    def _ask(self, method: str, path: str, limit_s: float) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=limit_s)  # no proxy, unlike urllib
        try:
            body = b"{}" if method == "POST" else None
            connection.request(method, path, body, {KEY_HEADER: self._key})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()
