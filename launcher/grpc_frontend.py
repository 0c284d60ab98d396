"""Asks Triton's gRPC frontend for answers, in HTTP/2 frames of its own: most server images have no gRPC library."""

from __future__ import annotations

import socket
import time

from launcher.probe import LIMIT_S

#: Triton serves these from queues with threads of their own, so that each can be stuck by itself.
METHODS = ("ServerLive", "ModelInfer", "ModelStreamInfer")
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
#: Types and flags of frames. Source: RFC 9113, section 6.
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _GOAWAY = 0, 1, 3, 4, 7
_END_STREAM = _ACK = 1
_END_HEADERS = 4
_STREAM = 1
#: A message of no bytes behind its prefix. Source: gRPC over HTTP2, Length-Prefixed-Message.
_EMPTY_MESSAGE = bytes(5)


class GrpcFrontend:
    """The gRPC port of a server, as the launcher reaches it."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port

    def silent_method(self) -> str | None:
        """Return a method whose calls are not answered within LIMIT_S, None if all are; an error is an answer."""
        return next((method for method in METHODS if not self._answers(method)), None)

    def _answers(self, method: str) -> bool:
        """Return whether a call ends in time. Its message names no model, so that it waits for none, however busy.

        A connection that is refused or closed also counts as an answer: nothing may listen there, or the server stops.
        """
        end_s = time.monotonic() + LIMIT_S
        try:
            with socket.create_connection(self._address, LIMIT_S) as connection:
                connection.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, b"") + _call(method))
                _await_end(connection, end_s)
        except TimeoutError:
            return False
        except OSError:
            return True
        return True


def _call(method: str) -> bytes:
    """Return the frames of a call with an empty message."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/inference.GRPCInferenceService/{method}",
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    headers = b"".join(_field(name) + _text(value) for name, value in fields.items())
    return _frame(_HEADERS, _END_HEADERS, _STREAM, headers) + _frame(_DATA, _END_STREAM, _STREAM, _EMPTY_MESSAGE)


def _field(name: str) -> bytes:
    """Return the start of a header field that no table holds. Source: RFC 7541, section 6.2.2."""
    return b"\0" + _text(name)


def _text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _await_end(connection: socket.socket, end_s: float) -> None:
    """Read until the call or the connection has ended; raises TimeoutError at `end_s`."""
    while head := _read(connection, 9, end_s):
        kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
        _read(connection, int.from_bytes(head[:3], "big"), end_s)
        if kind == _SETTINGS and not flags & _ACK:
            connection.sendall(_frame(_SETTINGS, _ACK, 0, b""))
        ends_stream = kind == _RST_STREAM or (kind in (_DATA, _HEADERS) and flags & _END_STREAM)
        if kind == _GOAWAY or (stream == _STREAM and ends_stream):
            return


def _read(connection: socket.socket, num_bytes: int, end_s: float) -> bytes:
    """Return so many bytes, or b"" if the peer has closed the connection; raises TimeoutError at `end_s`."""
    received = b""
    while len(received) < num_bytes:
        if (left_s := end_s - time.monotonic()) <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        if not (more := connection.recv(num_bytes - len(received))):
            return b""
        received += more
    return received
