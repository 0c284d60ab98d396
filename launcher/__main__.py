"""`python -m launcher [serving.toml]`: run a deployment until Ctrl-C or SIGTERM; SIGHUP restarts it with its file."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from launcher.log import print_error, print_event
from launcher.server import REPOSITORY, Server
from launcher.settings import LauncherSettings
from orchestrator.core.errors import ServingError

_EPILOG = """\
environment:
  SERVING_<KEY>            a key of the deployment file; wins over it
  SPECSERVE_HTTP_PORT      Triton's port for HTTP (8000); 0 = any free port
  SPECSERVE_GRPC_PORT      for gRPC (8001)
  SPECSERVE_METRICS_PORT   for metrics (8002)
  SPECSERVE_HEALTH_PORT    the launcher's own (8003), with /live, /ready and /drain
  SPECSERVE_HOST           the address to listen on (127.0.0.1)
  SPECSERVE_LOG_LEVEL      error, warning, info or verbose (warning)
  SPECSERVE_READY_LIMIT_S  seconds until all models must be ready (180); large engines take minutes
  SPECSERVE_HANG_LIMIT_S   seconds that the server may generate no token, though asked for one, before Triton is
                           restarted (20); longer than two passes of a large model on a slow machine
  SPECSERVE_STOP_LIMIT_S   seconds that running requests get when the server is stopped (10);
                           a second signal does not wait for them
  TRITON_ROOT              a Triton installation (/opt/tritonserver, else the wheel)

exit status: 0 stopped on request, 1 the server failed while running, 2 it could not be started
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="launcher", description=__doc__, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", default="serving.toml", help="the deployment (default: serving.toml)")
    parser.add_argument("--model-repository", default=REPOSITORY, metavar="FOLDER", help="Triton's model repository")
    options = parser.parse_args(arguments)
    for name, meant in LauncherSettings.ignored(os.environ).items():
        print_error(f"warning: {name} is not read; set {meant}")
    try:
        settings = LauncherSettings.from_environment(os.environ)
        server = Server(
            options.config,
            repository=options.model_repository,
            ports=settings.ports(),
            host=settings.host,
            ready_limit_s=settings.ready_limit_s,
            hang_limit_s=settings.hang_limit_s,
            stop_limit_s=settings.stop_limit_s,
            log_level=settings.log_level,
        )
    except ServingError as error:
        return _fail(error, 2)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: server.request_stop())
    signal.signal(signal.SIGHUP, lambda *_: server.request_reload())
    return _run(server)


def _run(server: Server) -> int:
    try:
        server.start()
    except ServingError as error:
        return 0 if server.stop_requested else _fail(error, 2)
    try:
        print(server.ready_line(), flush=True)
        failure = server.wait()
        if not failure:
            server.finish_requests()
    finally:
        server.stop()
    if failure:
        print_event(f"error: {failure}")
    return 1 if failure else 0


def _fail(what: object, status: int) -> int:
    print_error(f"error: {what}")
    return status


if __name__ == "__main__":
    sys.exit(main())
