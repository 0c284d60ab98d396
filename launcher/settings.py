"""What `SPECSERVE_<KEY>` in the environment sets for `python -m launcher`, and the ports that a server listens on."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import Field

from orchestrator.core.declarations import Declaration, parse_text, validate
from orchestrator.core.deployment.config import CALL_THREADS, ENGINE_KEY, STATE_FOLDER
from orchestrator.core.errors import ConfigError

PREFIX = "SPECSERVE_"
#: How similar (difflib's ratio) an unknown variable must be to one of ours to count as its misspelling.
SIMILAR = 0.9
#: Numbers of the errors that another port avoids: it is in use, or is one that only root may use.
_PORT_ERRORS = (errno.EADDRINUSE, errno.EACCES)
#: Linux's first and last port of outgoing connections; containers and hosts may set others.
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_FREE_PORT, _FREE_PORT_TRIES = 10_000, 200


@dataclass(frozen=True)
class Ports:
    """The TCP ports of a server: three of Triton's, and the launcher's own."""

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002
    health: int = 8003

    def urls(self, host: str) -> tuple[str, str, str, str]:
        """Return where a server that listens on `host` is reached: by HTTP, gRPC, for metrics and for its health."""
        http, grpc, metrics, health = (joined(reachable(host), port) for port in asdict(self).values())
        # tritonclient.http does not take the scheme of its address.
        return f"http://{http}", grpc, f"http://{metrics}/metrics", f"http://{health}"

    def check_free(self, host: str) -> None:
        """Raise ConfigError if something already listens on one of the ports."""
        for name, port in asdict(self).items():
            try:
                _listen(host, port).close()
            except OSError as error:
                at_fault = variable(f"{name}_port" if error.errno in _PORT_ERRORS else "host")
                raise ConfigError(
                    f"cannot listen on {joined(host, port)} for {name}: {error.strerror} (set {at_fault})"
                ) from None


def variable(key: str) -> str:
    """Return the environment variable of a setting."""
    return PREFIX + key.upper()


def reachable(host: str) -> str:
    """Return the address at which this machine reaches a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def joined(host: str, port: int) -> str:
    """Return host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def free_ports() -> Ports:
    """Return four ports that are free on this machine now.

    They lie below the range from which the kernel serves outgoing connections and listeners on port 0: another
    process would otherwise be given one of them before Triton listens on it, or while Triton is started anew.
    """
    free: list[int] = []
    for port in random.sample(range(_LOWEST_FREE_PORT, _lowest_ephemeral_port()), k=_FREE_PORT_TRIES):
        with contextlib.suppress(OSError):
            _listen("127.0.0.1", port).close()
            free.append(port)
        if len(free) == 4:
            return Ports(*free)
    raise ConfigError(f"found fewer than four free ports among {_FREE_PORT_TRIES} that were tried")


def _lowest_ephemeral_port() -> int:
    try:
        return max(int(_EPHEMERAL_PORTS.read_text().split()[0]), _LOWEST_FREE_PORT + _FREE_PORT_TRIES)
    except OSError:
        return 32768  # Linux's default


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    # As Triton does; without it a port that was just released would seem taken for a minute.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1)  # two sockets may bind under SO_REUSEADDR, only one may listen
    except OSError:
        listener.close()
        raise
    return listener


def _port(default: int) -> Any:
    return Field(default, ge=0, le=65535, description="a port in 0..65535")


def _seconds(default: int) -> Any:
    return Field(default, ge=1, le=24 * 3600, description=f"a whole number of seconds in 1..{24 * 3600}")


class LauncherSettings(Declaration):
    """The settings; each key is the name of an environment variable in lower case, without its prefix.

    They have a prefix because other programs set the bare names: conda's compilers and tcsh set HOST.
    """

    #: 0 = any free port
    http_port: int = _port(Ports.http)
    grpc_port: int = _port(Ports.grpc)
    metrics_port: int = _port(Ports.metrics)
    health_port: int = _port(Ports.health)
    #: the address to listen on
    host: str = "127.0.0.1"
    log_level: str = "warning"
    #: limit from the start until all models are ready, and for each model that is reloaded
    ready_limit_s: int = _seconds(180)
    #: how long the server may generate no token, though asked for one, until Triton is restarted
    hang_limit_s: int = _seconds(20)
    #: how long running requests get when the server is stopped
    stop_limit_s: int = _seconds(10)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> LauncherSettings:
        """Read the variables that are set; raises ConfigError for a wrong value."""
        texts = {key: text for key in cls.model_fields if (text := environ.get(variable(key)))}
        values = {key: parse_text(cls, key, text) for key, text in texts.items()}
        return validate(cls, values, lambda key: f"environment variable {variable(key)}")

    @classmethod
    def ignored(cls, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that are set, but not read, each with the one that was probably meant.

        They are those that an earlier release read under a bare name, unless others set that name, too, and those with
        our prefix that resemble one of ours. Not all with our prefix: for a Service or container named specserve,
        Kubernetes and Docker set some, too.
        """
        names = [key for key in cls.model_fields if key not in ("host", "log_level")]
        bare = {
            key.upper(): variable(key) for key in names if environ.get(key.upper()) and not environ.get(variable(key))
        }
        known = [*map(variable, cls.model_fields), CALL_THREADS]
        others = [
            name for name in environ if name.startswith(PREFIX) and name not in (*known, STATE_FOLDER, ENGINE_KEY)
        ]
        return bare | {name: near[0] for name in others if (near := get_close_matches(name, known, 1, SIMILAR))}

    def ports(self) -> Ports:
        """Return the ports to listen on; raises ConfigError if two are the same."""
        free = free_ports()
        ports = Ports(**{name: getattr(self, f"{name}_port") or port for name, port in asdict(free).items()})
        if len({*asdict(ports).values()}) < len(asdict(ports)):
            variables = ", ".join(variable(f"{name}_port") for name in asdict(ports))
            raise ConfigError(f"ports must differ, got {asdict(ports)} ({variables})")
        return ports
