"""Limits of connections: readers that stop reading, requests that never come, too many at once."""

import contextlib
import json
import socket
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.settings import Settings
from tests.support.clients import until
from tests.support.gateway import RunningGateway
from tests.support.standin_replica import StandInReplica
from tests.unit.gateway.test_app import BODY, LIMIT_S
from tests.unit.gateway.test_tokenizer import write

pytestmark = pytest.mark.unit

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"


def connect(gateway: RunningGateway) -> socket.socket:
    """Return a connection to a gateway."""
    host, port = urllib.parse.urlsplit(gateway.url).netloc.split(":")
    return socket.create_connection((host, int(port)), LIMIT_S)


@contextlib.contextmanager
def limited(replica: StandInReplica, folder: Path, **settings: Any) -> Iterator[RunningGateway]:
    limits = {"receive_limit_s": 0.5, "send_limit_s": 0.5, "stop_limit_s": 5, "log_level": "warning"} | settings
    gateway = RunningGateway(Settings(replicas=replica.address, tokenizer=str(write(folder)), **limits))
    gateway.start(waits=True)
    try:
        yield gateway
    finally:
        gateway.stop()


def is_closed(connection: socket.socket) -> bool:
    """Return whether the peer has closed a connection; what it has sent is skipped."""
    connection.setblocking(False)
    try:
        while connection.recv(65536):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def answer_on(connection: socket.socket) -> tuple[str, dict[str, Any]]:
    """Return the head and the body of the one response before a connection is closed."""
    connection.settimeout(LIMIT_S)
    received = b""
    while part := connection.recv(65536):
        received += part
    head, _, body = received.partition(b"\r\n\r\n")
    return head.decode().lower(), json.loads(body)


def test_a_reader_that_stops_reading_loses_its_request(replica: StandInReplica, tmp_path: Path) -> None:
    replica.pace_s, before = 0.05, replica.num_cancelled
    # More than the kernel holds: each of the choices begins with its prompt.
    body = json.dumps({"prompt": "a" * 2_000_000, "echo": True, "n": 8, "max_tokens": 10_000, "stream": True})
    try:
        with limited(replica, tmp_path, send_limit_s=2) as gateway, connect(gateway) as connection:
            (one,) = gateway.state.replicas.all.values()
            connection.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            until(lambda: one.num_running == 8, "the request", LIMIT_S)
            until(lambda: one.num_running == 0, "its end", LIMIT_S)
            until(lambda: replica.num_cancelled > before, "the end of its streams", LIMIT_S)
            until(lambda: gateway.metric("spec_gateway_requests_running") == 0, "the end of the response", LIMIT_S)
    finally:
        replica.pace_s = 0.0


def test_a_reader_that_is_slow_gets_all(replica: StandInReplica, tmp_path: Path) -> None:
    """It takes longer than the limit altogether, but never reads nothing for so long."""
    body = json.dumps({"prompt": "a" * 3_000_000, "echo": True, "n": 8, "max_tokens": 2})
    with limited(replica, tmp_path, send_limit_s=1.5) as gateway, connect(gateway) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 200_000)
        connection.sendall(f"{HEAD}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        received = bytearray()
        until(lambda: not (part := connection.recv(200_000)) or received.extend(part), "the end", 60)
    _, _, text = received.partition(b"\r\n\r\n")
    assert [len(choice["text"]) for choice in json.loads(text)["choices"]] == [3_000_002] * 8


def test_a_body_that_does_not_come_in_time_is_a_408(replica: StandInReplica, tmp_path: Path) -> None:
    with limited(replica, tmp_path) as gateway, connect(gateway) as connection:
        connection.sendall(f'{HEAD}Content-Length: 9000\r\n\r\n{{"prompt"'.encode())
        head, body = answer_on(connection)
        assert head.startswith("http/1.1 408 ") and "connection: close" in head
        assert body["error"]["code"] == "request_timeout" and "receive_limit_s" in body["error"]["message"]
        assert gateway.metric('spec_gateway_requests_total{endpoint="/v1/completions",status="408"}') == 1
        assert gateway.post("/v1/completions", BODY).status_code == 200


def test_many_long_bodies_at_once_keep_out_no_short_one(replica: StandInReplica, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        gateway = stack.enter_context(limited(replica, tmp_path, receive_limit_s=60, max_body_bytes=70_000))
        for _ in range(8):
            connection = stack.enter_context(connect(gateway))
            connection.sendall(f"{HEAD}Content-Length: 70000\r\n\r\n".encode() + b" " * 69_999)
        long = BODY | {"prompt": "a" * 69_000}
        until(lambda: gateway.post("/v1/completions", long).status_code == 503, "a refusal", LIMIT_S)
        refused = gateway.post("/v1/completions", long)
        assert refused.headers["Retry-After"] == "1" and "max_body_bytes" in refused.json()["error"]["message"]
        assert gateway.post("/v1/completions", BODY).status_code == 200
        connection.close()
        until(lambda: gateway.post("/v1/completions", long).status_code == 200, "room", LIMIT_S)
