"""`python -m gateway`: OpenAI's API in front of Triton servers, which it can start itself (`--serve serving.toml`)."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence

import uvicorn
from fastapi import FastAPI

from gateway.app import create_app
from gateway.connections import raise_file_limit, server_config
from gateway.listening import address_of, bound, listen, metrics_served
from gateway.local import serving, target_of
from gateway.settings import PREFIX, Settings, SettingsError, parse_flags, read_settings

_EPILOG = f"""\
Each setting is also an environment variable, {PREFIX}<NAME>: --api-keys-file is {PREFIX}API_KEYS_FILE.
exit status: 0 stopped on request, 2 it could not be started
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the gateway; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="gateway", description=__doc__, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--serve", metavar="CONFIG", help="start servers of this deployment instead of naming --replicas"
    )
    parser.add_argument("--num-replicas", type=int, default=1, help="servers that --serve starts (%(default)s)")
    options, flags = parse_flags(parser, arguments)
    # Like Ctrl-C, SIGTERM unwinds every `with` block, so that the servers started here are stopped too.
    # uvicorn handles both signals while it serves, and raises them again when it has ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if options.serve:
            flags.setdefault("tokenizer", target_of(options.serve))
        run(read_settings(flags, os.environ), options.serve, options.num_replicas)
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        return 0
    return 0


def run(settings: Settings, config: str | None, num_replicas: int) -> None:
    """Serve until Ctrl-C or SIGTERM. config: the deployment of the servers to start, if any; raises SettingsError.

    Errors of the gateway itself are found before the servers load their models, which may take minutes.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("gateway").setLevel(settings.log_level.upper())
    raise_file_limit(settings.max_connections)
    app = create_app(settings)
    gateway = app.state.gateway
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(bound(settings.host, settings.port, "port"))
        if settings.metrics_port is not None:
            stack.enter_context(metrics_served(gateway.metrics.registry, settings.host, settings.metrics_port))
        if config:
            gateway.replicas.addresses = ",".join(stack.enter_context(serving(config, num_replicas)))
        serve(app, settings, listener)


def serve(app: FastAPI, settings: Settings, listener: socket.socket) -> None:
    """Serve on a bound socket until Ctrl-C or SIGTERM."""
    config = server_config(app, settings)
    listen(listener, "port", config.backlog)  # a client that reads the line below may connect at once
    address = address_of(listener)
    replicas = app.state.gateway.replicas.addresses
    print(f"gateway: http://{address}/v1, playground http://{address}/, replicas {replicas}", flush=True)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    sys.exit(main())
