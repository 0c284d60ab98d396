"""`python -m gateway`: OpenAI's API in front of Triton servers that run, or that it starts (`--serve serving.toml`)."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence

import uvicorn

from gateway.app import create_app
from gateway.local import serving, target_of
from gateway.settings import PREFIX, Settings, SettingsError, parse_flags, read_settings

_EPILOG = f"""\
Each setting is also a variable of the environment, {PREFIX}<NAME>: --api-keys-file is {PREFIX}API_KEYS_FILE.
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
    # As Ctrl-C does, SIGTERM leaves every block on its way out, so that the servers started here are stopped, too.
    # uvicorn handles both signals while it serves, and raises them again when it has ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with contextlib.ExitStack() as stack:
            if options.serve:
                flags.setdefault("tokenizer", target_of(options.serve))
                flags["replicas"] = ",".join(stack.enter_context(serving(options.serve, options.num_replicas)))
            run(read_settings(flags, os.environ))
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        return 0
    return 0


def run(settings: Settings) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    config = uvicorn.Config(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        log_level=settings.log_level,
        access_log=settings.log_level == "debug",
        timeout_graceful_shutdown=settings.stop_limit_s,
    )
    socket = config.bind_socket()
    socket.listen(config.backlog)  # a client that reads the line below may connect at once
    port = socket.getsockname()[1]
    host = "127.0.0.1" if settings.host == "0.0.0.0" else settings.host
    print(
        f"gateway: http://{host}:{port}/v1, playground http://{host}:{port}/, replicas {settings.replicas}", flush=True
    )
    uvicorn.Server(config).run(sockets=[socket])


if __name__ == "__main__":
    sys.exit(main())
