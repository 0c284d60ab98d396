"""Processes of a server that a test kills or stops, and what Triton may do then."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import grpc
import pytest

from launcher import Server
from tests.support.clients import until

#: A Triton that is stuck on a lock of a dead process is killed only when its reload has not been answered for 60 s.
RESTART_LIMIT_S = 600.0


def pid_of(server: Server, model: str) -> int:
    """Return the id of a model's process."""
    (pid,) = [pid for pid, name in server.pids().items() if name == model]
    return pid


def is_replaced(server: Server, model: str, gone: int) -> bool:
    """Return whether the launcher has started another process for the model than `gone`."""
    return any(pid != gone and name == model for pid, name in server.pids().items())


def await_replaced(server: Server, model: str, gone: int) -> None:
    """Wait until the launcher has started another process for the model than `gone`."""
    until(lambda: is_replaced(server, model, gone), f"another process of {model}")


def await_ready(server: Server) -> Server:
    """Wait until the server is ready, as the launcher may have to start an aborted Triton again; return the server."""
    end_s = time.monotonic() + RESTART_LIMIT_S
    while why := server.why_not_ready():
        assert time.monotonic() < end_s, f"after {RESTART_LIMIT_S:g} s: {why}; {server.failure()}"
        time.sleep(0.1)
    return server


@contextlib.contextmanager
def unless_triton_aborts(server: Server) -> Iterator[None]:
    """Skip the rest if Triton 2.51 aborts because the dead process held one of its locks (triton#8882)."""
    before = pid_of(server, "tritonserver")
    try:
        yield
    except grpc.RpcError:
        await_ready(server)
        if pid_of(server, "tritonserver") == before or "boost::interprocess::lock_exception" not in server.log():
            raise
        assert server.failure() is None
        pytest.skip("Triton aborted: the process was killed while it held a lock in shared memory (triton#8882)")
