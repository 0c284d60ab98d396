"""The three TCP ports of a server; knows nothing of what listens there."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields

from orchestrator.core.errors import ConfigError


@dataclass(frozen=True)
class Ports:
    """Where a server listens."""

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Ports:
        """Read HTTP_PORT, GRPC_PORT and METRICS_PORT; 0 means any free port."""
        usual, free = vars(cls()), vars(free_ports())
        chosen = {name: _port(environ, name, usual[name]) or free[name] for name in usual}
        if len(set(chosen.values())) < len(chosen):
            raise ConfigError(f"ports must differ, got {chosen} (HTTP_PORT, GRPC_PORT, METRICS_PORT)")
        return cls(**chosen)

    def check_free(self, host: str) -> None:
        """Raise ConfigError when something listens on one of the ports already."""
        for f in fields(self):
            port = getattr(self, f.name)
            try:
                _bind(host, port).close()
            except OSError as error:
                raise ConfigError(
                    f"cannot listen on {host}:{port} for {f.name}: {error.strerror} (set {f.name.upper()}_PORT)"
                ) from None


def free_ports() -> Ports:
    """Return three ports that are free on this machine now."""
    with contextlib.ExitStack() as stack:  # all three held at once, so that they differ
        bound = [stack.enter_context(_bind("127.0.0.1", 0)) for _ in fields(Ports)]
        return Ports(*(listener.getsockname()[1] for listener in bound))


def _bind(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    # As Triton does; without it a port that was just given back would look busy for a minute.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1)  # two sockets may bind under SO_REUSEADDR, only one may listen
    except OSError:
        listener.close()
        raise
    return listener


def _port(environ: Mapping[str, str], name: str, default: int) -> int:
    variable = f"{name.upper()}_PORT"
    text = environ.get(variable) or str(default)
    if not (text.isascii() and text.isdigit() and int(text) < 65536):
        raise ConfigError(f"{variable} must be a port in 0..65535, got {text!r} (environment)")
    return int(text)
