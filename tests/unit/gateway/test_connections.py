"""Limits of connections: readers that stop reading, requests that never come, too many at once."""

import contextlib
import json
import resource
import socket
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.connections import raise_file_limit
from gateway.settings import Settings, SettingsError
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


def trickles_until_closed(connection: socket.socket, text: bytes) -> None:
    """Send a text again and again, until the peer closes the connection."""

    def sent() -> bool:
        with contextlib.suppress(ConnectionError, BlockingIOError):
            connection.send(text)
        return is_closed(connection)

    until(sent, "the end of the connection", LIMIT_S)


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


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", HEAD.encode()])
def test_a_request_whose_head_never_comes_is_not_awaited(replica: StandInReplica, tmp_path: Path, sent: bytes) -> None:
    with limited(replica, tmp_path) as gateway, connect(gateway) as connection:
        connection.sendall(sent)
        until(lambda: is_closed(connection), "the end of the connection", LIMIT_S)


def test_a_head_that_trickles_in_gets_no_more_time(replica: StandInReplica, tmp_path: Path) -> None:
    with limited(replica, tmp_path) as gateway, connect(gateway) as connection:
        first = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
        connection.sendall(first)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        trickles_until_closed(connection, b"A")  # the second request on it


def test_a_body_that_does_not_come_in_time_is_a_408(replica: StandInReplica, tmp_path: Path) -> None:
    with limited(replica, tmp_path) as gateway, connect(gateway) as connection:
        connection.sendall(f'{HEAD}Content-Length: 9000\r\n\r\n{{"prompt"'.encode())
        head, body = answer_on(connection)
        assert head.startswith("http/1.1 408 ") and "connection: close" in head
        assert body["error"]["code"] == "request_timeout" and "receive_limit_s" in body["error"]["message"]
        assert gateway.metric('spec_gateway_requests_total{endpoint="/v1/completions",status="408"}') == 1
        assert gateway.post("/v1/completions", BODY).status_code == 200


def test_the_rest_of_a_refused_body_gets_no_more_time(replica: StandInReplica, tmp_path: Path) -> None:
    with limited(replica, tmp_path) as gateway, connect(gateway) as connection:
        connection.sendall(f"{HEAD.replace('/v1/', '/v9/')}Content-Length: 9000000\r\n\r\n".encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 404 ")
        trickles_until_closed(connection, b" ")


def test_a_new_connection_takes_the_place_of_the_one_idle_for_longest(replica: StandInReplica, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        gateway = stack.enter_context(limited(replica, tmp_path, receive_limit_s=60, max_connections=4))
        state = gateway._server.server_state
        until(lambda: not state.connections, "the end of the probes' connections", LIMIT_S)
        idle = []
        for number in range(4):
            idle.append(stack.enter_context(connect(gateway)))
            until(lambda number=number: len(state.connections) == number + 1, "a connection", LIMIT_S)
        assert gateway.get("/health").status_code == 200
        assert [is_closed(connection) for connection in idle] == [True, False, False, False]


def test_running_requests_are_never_closed_for_a_new_connection(replica: StandInReplica, tmp_path: Path) -> None:
    replica.pace_s = 0.05
    body = json.dumps({"prompt": "a", "max_tokens": 10_000, "stream": True})
    try:
        with contextlib.ExitStack() as stack:
            gateway = stack.enter_context(limited(replica, tmp_path, receive_limit_s=60, max_connections=2))
            (one,) = gateway.state.replicas.all.values()
            streams = [stack.enter_context(connect(gateway)) for _ in range(2)]
            for stream in streams:
                stream.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            until(lambda: one.num_running == 2, "the streams", LIMIT_S)
            until(lambda: is_closed(stack.enter_context(connect(gateway))), "the end of a third one", LIMIT_S)
            assert one.num_running == 2 and not any(is_closed(stream) for stream in streams)
    finally:
        replica.pace_s = 0.0


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


def test_the_limit_of_open_files_is_raised_and_must_suffice_for_the_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    raise_file_limit(960)
    assert limits == [(1024, 1024)]
    with pytest.raises(SettingsError, match="max_connections must be at most 960, since this process may open 1024"):
        raise_file_limit(961)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, resource.RLIM_INFINITY))
    raise_file_limit(1 << 40)
