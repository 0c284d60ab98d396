"""A gateway for the tests: the real application under uvicorn on a free port, on a thread of its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from gateway.__main__ import server_config
from gateway.app import create_app
from gateway.settings import Settings
from tests.support.clients import until


class RunningGateway:
    """A gateway. url: where it listens. state: the state that its routes share."""

    def __init__(self, settings: Settings) -> None:
        app = create_app(settings)
        self.state = app.state.gateway
        config = server_config(app, settings)
        config.host, config.port = "127.0.0.1", 0
        self._server = uvicorn.Server(config)
        socket = config.bind_socket()
        self.url = f"http://127.0.0.1:{socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [socket]}, daemon=True)

    def start(self, waits: bool) -> None:
        """Start the gateway; with `waits`, wait until a replica is ready."""
        self._thread.start()
        until(lambda: self._server.started, "the gateway")
        if waits:
            until(lambda: self.get("/ready").status_code == 200, "a ready replica")

    def stop(self) -> None:
        """Stop the gateway and wait for its end."""
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive(), "the gateway did not stop"

    def get(self, path: str, **options: Any) -> httpx.Response:
        """GET a path."""
        return httpx.get(self.url + path, timeout=30, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """POST JSON to a path."""
        return httpx.post(self.url + path, json=body, timeout=60, **options)

    def metric(self, name: str) -> float:
        """Return the sum over the series with this name, and with the labels that it has in braces."""
        lines = (line.rpartition(" ") for line in self.get("/metrics").text.splitlines())
        (wanted, labels), found = _split(name), ((*_split(series), value) for series, _, value in lines)
        return sum(float(value) for series, others, value in found if series == wanted and labels <= others)


def _split(series: str) -> tuple[str, set[str]]:
    """Return the name of a series and its labels."""
    name, _, labels = series.removesuffix("}").partition("{")
    return name, set(labels.split(",")) - {""}


@contextlib.contextmanager
def running_gateway(replicas: str, tokenizer: Path, waits: bool = True, **settings: Any) -> Iterator[RunningGateway]:
    """Run a gateway in front of these replicas."""
    options = {"stop_limit_s": 5, "log_level": "warning"} | settings
    gateway = RunningGateway(Settings(replicas=replicas, tokenizer=str(tokenizer), **options))
    gateway.start(waits)
    try:
        yield gateway
    finally:
        gateway.stop()
