"""The gateway's ports: bound before anything starts, so that a port that is taken is a one-line error.

The gateway begins to listen last, so that no client waits for an answer while servers load their models.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import prometheus_client

from gateway.settings import PREFIX, SettingsError


@contextlib.contextmanager
def bound(host: str, port: int, setting: str) -> Iterator[socket.socket]:
    """Yield a socket bound to an address, which is closed at the end; raises SettingsError naming the setting."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        # Without this option, a port that was just released would seem taken for a minute.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise _cannot_listen(f"{host}:{port}", setting, error) from None
        yield listener


def listen(listener: socket.socket, setting: str, backlog: int) -> None:
    """Begin to listen; raises SettingsError if another socket, bound to the same port, already does."""
    try:
        listener.listen(backlog)
    except OSError as error:
        raise _cannot_listen(address_of(listener), setting, error) from None


def address_of(listener: socket.socket) -> str:
    """Return host:port where a client on this machine reaches a bound socket."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextlib.contextmanager
def metrics_served(registry: prometheus_client.CollectorRegistry, host: str, port: int) -> Iterator[int]:
    """Serve /metrics on a port of its own, without a key; yield the port. Raises SettingsError."""
    try:
        server, thread = prometheus_client.start_http_server(port, host, registry)
    except OSError as error:
        raise _cannot_listen(f"{host}:{port}", "metrics_port", error) from None
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _cannot_listen(address: str, setting: str, error: OSError) -> SettingsError:
    variable = f"{PREFIX}{setting.upper()}"
    return SettingsError(
        f"cannot listen on {address}: {error.strerror} (--host, --{setting.replace('_', '-')} or {variable})"
    )
