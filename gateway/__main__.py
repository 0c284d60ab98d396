"""`python -m gateway`: OpenAI's API in front of Triton servers."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator, Sequence

import prometheus_client
import uvicorn
from fastapi import FastAPI

from gateway.app import create_app
from gateway.settings import KEEP_ALIVE_S, PREFIX, Settings, SettingsError, parse_flags, places_of, read_settings

_EPILOG = f"""\
Each setting is also an environment variable, {PREFIX}<NAME>: --api-keys-file is {PREFIX}API_KEYS_FILE.
exit status: 0 stopped on request, 2 it could not be started
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the gateway; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="gateway", description=__doc__, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _, flags = parse_flags(parser, arguments)
    # uvicorn handles both signals while it serves, and raises them again when it has ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run(read_settings(flags, os.environ))
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


def run(settings: Settings) -> None:
    """Serve until Ctrl-C or SIGTERM; raises SettingsError."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("gateway").setLevel(settings.log_level.upper())
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # each connection of a client is one
    app = create_app(settings)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_bound(settings.host, settings.port))
        if settings.metrics_port is not None:
            stack.enter_context(_metrics_served(app, settings.host, settings.metrics_port))
        host, port = listener.getsockname()[:2]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        print(f"gateway: http://{address}/v1, playground http://{address}/, replicas {settings.replicas}", flush=True)
        uvicorn.Server(server_config(app, settings)).run(sockets=[listener])


def server_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """Return how uvicorn serves the gateway."""
    return uvicorn.Config(
        app,
        log_level=settings.log_level,
        access_log=False,  # the middleware writes one line per request
        timeout_graceful_shutdown=settings.stop_limit_s,
        timeout_keep_alive=KEEP_ALIVE_S,
        ws="none",
    )


@contextlib.contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """Yield a socket that listens, which is closed at the end; raises SettingsError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise _cannot_listen(host, port, "port", error) from None
    with listener:
        yield listener


@contextlib.contextmanager
def _metrics_served(app: FastAPI, host: str, port: int) -> Iterator[None]:
    """Serve /metrics on a port of its own, without a key; raises SettingsError."""
    try:
        server, _ = prometheus_client.start_http_server(port, host, app.state.gateway.metrics.registry)
    except OSError as error:
        raise _cannot_listen(host, port, "metrics_port", error) from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def _cannot_listen(host: str, port: int, setting: str, error: OSError) -> SettingsError:
    return SettingsError(f"cannot listen on {host}:{port}: {error.strerror} (--host, {places_of(setting)})")


if __name__ == "__main__":
    sys.exit(main())
