"""The launcher's question over gRPC, before gRPC's own server and before ports that are not one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent import futures

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from launcher import grpc_frontend
from launcher.grpc_frontend import GrpcFrontend, _frame
from tests.support.hanging import WAIT_S, Hang

#: Triton 2.51 serves each of these on threads of its own, so each is to be asked.
WANTED = ("ServerLive", "ModelInfer", "ModelStreamInfer")
SETTINGS = _frame(4, 0, 0, b"")


class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers as Triton does a request without a model; `silent`: the method that does not answer."""

    def __init__(self) -> None:
        self.silent, self.hang, self.asked = "", Hang(), list[str]()

    def _note(self, method: str) -> None:
        self.asked.append(method)
        if method == self.silent:
            self.hang()

    def ServerLive(self, request, context):  # noqa: N802
        self._note("ServerLive")
        return service_pb2.ServerLiveResponse(live=True)

    def ModelInfer(self, request, context):  # noqa: N802
        self._note("ModelInfer")
        context.abort(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{request.model_name}' is not found")

    def ModelStreamInfer(self, request_iterator, context):  # noqa: N802
        for request in request_iterator:
            self._note("ModelStreamInfer")
            yield service_pb2.ModelStreamInferResponse(error_message=f"unknown model: '{request.model_name}'")


@pytest.fixture
def servicer() -> Servicer:
    return Servicer()


@pytest.fixture
def frontend(servicer: Servicer) -> Iterator[GrpcFrontend]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield GrpcFrontend("127.0.0.1", port)
    servicer.hang.let_go.set()
    server.stop(None).wait(WAIT_S)


@pytest.fixture
def listening() -> Iterator[Callable[[bytes | None], GrpcFrontend]]:
    """Return a function that opens a port which sends these bytes and then falls silent; None: closes at once."""
    opened: list[socket.socket] = []

    def serve(listener: socket.socket, sent: bytes | None) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            if sent is None:
                connection.close()
            else:
                opened.append(connection)
                connection.sendall(sent)

    def open_port(sent: bytes | None) -> GrpcFrontend:
        listener = socket.create_server(("127.0.0.1", 0))
        opened.append(listener)
        threading.Thread(target=serve, args=(listener, sent), daemon=True).start()
        return GrpcFrontend(*listener.getsockname())

    yield open_port
    for one in opened:
        with one:
            one.shutdown(socket.SHUT_RDWR)


def test_each_method_is_asked_once_and_an_error_is_an_answer(servicer: Servicer, frontend: GrpcFrontend) -> None:
    assert frontend.silent_method() is None
    assert tuple(servicer.asked) == WANTED


@pytest.mark.parametrize("method", WANTED)
def test_a_method_that_is_silent_by_itself_is_named(
    servicer: Servicer, frontend: GrpcFrontend, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(grpc_frontend, "LIMIT_S", 0.5)
    servicer.silent = method
    assert frontend.silent_method() == method
    assert servicer.hang.begun.is_set(), "the call came to the server"


@pytest.mark.parametrize("sent", [b"", SETTINGS, SETTINGS + _frame(1, 4, 1, b"\x88"), SETTINGS * 3 + b"\0\0"])
def test_a_port_that_accepts_and_ends_no_call_is_silent(
    listening: Callable[[bytes | None], GrpcFrontend], monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(grpc_frontend, "LIMIT_S", 0.2)
    assert listening(sent).silent_method() == "ServerLive"


@pytest.mark.parametrize("sent", [None, SETTINGS + _frame(7, 0, 0, bytes(8)), _frame(3, 0, 1, bytes(4))])
def test_a_port_that_ends_the_call_or_the_connection_is_not_silent(
    listening: Callable[[bytes | None], GrpcFrontend], sent: bytes | None
) -> None:
    assert listening(sent).silent_method() is None


def test_a_port_on_which_nothing_listens_is_not_silent() -> None:
    """A server without a gRPC frontend has nothing that could be stuck."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    assert GrpcFrontend(*address).silent_method() is None
