"""The launcher's health port, without a server behind it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from launcher.health import HealthServer
from launcher.settings import free_ports
from orchestrator.core.deployment.drain_state import Drain

LIMIT_S = 20


class Watched:
    """A server that lives, but is not ready."""

    def why_not_live(self) -> str | None:
        return None

    def why_not_ready(self) -> str | None:
        return "the models are being loaded"

    def reload(self) -> str:
        return "nothing"


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    port = free_ports().health
    server = HealthServer("127.0.0.1", port, Watched(), Drain(tmp_path), cast(Any, None))
    yield port
    server.close()


@pytest.mark.parametrize(("path", "status"), [("/live", 200), ("/ready", 503), ("/drain", 200), ("/nothing", 404)])
def test_a_probe_may_ask_with_head(port: int, path: str, status: int) -> None:
    for method in ("GET", "HEAD"):
        with socket.create_connection(("127.0.0.1", port), LIMIT_S) as connection:
            connection.sendall(f"{method} {path} HTTP/1.0\r\n\r\n".encode())
            head, _, body = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")
        assert head.startswith(f"HTTP/1.0 {status} ".encode())
        assert bool(body) == (method == "GET")
