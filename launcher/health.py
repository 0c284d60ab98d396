"""The launcher's own HTTP port for probes and preStop hooks: liveness, readiness, drain and reload.

GET /live     200, or 503 and why the server must be restarted
GET /ready    200, or 503 and why it takes no requests
GET /token    200 when a token has just been generated, or 503 and why not
GET /drain    {"draining": false, "running": 3}
PUT /drain    begin the drain; DELETE /drain ends it; from this machine only
PUT /reload   restart behind a drain: 200 and what has changed, or 409 and why it was refused; from this machine only
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Protocol

from launcher.probe import Probe
from orchestrator.core.deployment.drain_state import Drain
from orchestrator.core.errors import ServingError


class Watched(Protocol):
    """The server whose health is reported."""

    def why_not_live(self) -> str | None:
        """Return why the server must be restarted, None if it need not be."""

    def why_not_ready(self) -> str | None:
        """Return why the server takes no requests now, None if it takes them."""

    def reload(self) -> str:
        """Restart with the deployment file as it is; return its changes in words, raise ServingError if refused."""


class HealthServer:
    """Answers on a thread until `close`."""

    def __init__(self, host: str, port: int, server: Watched, server_drain: Drain, token_probe: Probe) -> None:
        class Handler(_Handler):
            watched, drain, probe = server, server_drain, token_probe

        self._http = _Listener((host, port), Handler)
        threading.Thread(target=self._http.serve_forever, args=(0.1,), name="health", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._http.shutdown()
        self._http.server_close()


class _Listener(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Write nothing: a probe that goes away before its answer does no harm."""


class _Handler(BaseHTTPRequestHandler):
    watched: Watched
    drain: Drain
    probe: Probe
    timeout = 5.0

    def do_GET(self) -> None:
        if self.path == "/live":
            self._answer_health(self.watched.why_not_live())
        elif self.path == "/ready":
            self._answer_health(self.watched.why_not_ready())
        elif self.path == "/token":
            self._answer_health(self.watched.why_not_live() or self.probe.why_no_token())
        elif self.path == "/drain":
            self._answer_drain()
        else:
            self._answer(404, "not found (there are /live, /ready, /token and /drain)")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_PUT(self) -> None:
        if self.path == "/reload":
            self._reload()
        else:
            self._change_drain(Drain.begin)

    def do_DELETE(self) -> None:
        self._change_drain(Drain.cancel)

    def _reload(self) -> None:
        if self._is_from_here("a reload"):
            try:
                self._answer(200, self.watched.reload())
            except ServingError as error:
                self._answer(409, str(error))

    def _is_from_here(self, what: str) -> bool:
        # A probe may come from anywhere, but only clients on this machine may change the server.
        if self.client_address[0] == self.connection.getsockname()[0]:
            return True
        self._answer(403, f"{what} may only be requested from the server's own machine or container")
        return False

    def _change_drain(self, change: Callable[[Drain], None]) -> None:
        if not self._is_from_here("a drain"):
            return
        if self.path != "/drain":
            self._answer(404, "not found (only /drain can be changed, and /reload asked for)")
        else:
            change(self.drain)
            self._answer_drain()

    def _answer_health(self, problem: str | None) -> None:
        self._answer(503 if problem else 200, problem or "ok")

    def _answer_drain(self) -> None:
        self._answer(200, json.dumps({"draining": self.drain.is_requested, "running": self.drain.num_running()}))

    def _answer(self, status: int, text: str) -> None:
        body = f"{text}\n".encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write nothing: probes come every few seconds."""
