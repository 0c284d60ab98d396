"""`python -m launcher.drain`: take a running server out of service without losing a request.

From then on the server refuses new requests (UNAVAILABLE) and is not ready; those it has accepted run to their end. The
command returns when the last one has ended. The server keeps running: stop it then, or `--cancel` the drain.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
from collections.abc import Sequence

from launcher.log import print_error
from launcher.settings import LauncherSettings, joined, reachable
from orchestrator.core.deployment.drain_state import wait_until_idle
from orchestrator.core.errors import ServingError

_EPILOG = """\
environment:
  SPECSERVE_HEALTH_PORT, SPECSERVE_HOST
      where the launcher answers (8003, 127.0.0.1): the values that it was started with

exit status: 0 no request runs any more, 1 some still ran at the limit, 2 no launcher answered
"""


class LauncherClient:
    """Calls the health port of a launcher on this machine."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = reachable(host), port

    def drain(self, method: str) -> int:
        """Begin (PUT), cancel (DELETE) or read (GET) the drain; return how many sequences run."""
        status, body = self.request(method, "/drain", 5.0)
        try:
            if status == 200:
                return int(json.loads(body)["running"])
        except (ValueError, KeyError):
            raise self._no_answer(body) from None
        raise ServingError(f"the launcher at {self._where} refused: {body}")

    def request(self, method: str, path: str, limit_s: float) -> tuple[int, str]:
        """Return the status and text of the launcher's answer; raises ServingError if none comes within `limit_s`."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=limit_s)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace").strip()
        except (OSError, http.client.HTTPException) as error:
            raise self._no_answer(error or type(error).__name__) from None
        finally:
            connection.close()

    @property
    def _where(self) -> str:
        return f"{joined(self._host, self._port)} (SPECSERVE_HOST, SPECSERVE_HEALTH_PORT)"

    def _no_answer(self, reason: object) -> ServingError:
        return ServingError(f"no launcher answers at {self._where}: {reason}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Drain, or cancel a drain; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="launcher.drain", description=__doc__, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit-s", type=float, default=60.0, metavar="S", help="how long to wait (default: 60)")
    parser.add_argument("--cancel", action="store_true", help="accept requests again, and return")
    options = parser.parse_args(arguments)
    try:
        settings = LauncherSettings.from_environment(os.environ)
        client = LauncherClient(settings.host, settings.health_port)
        if options.cancel:
            client.drain("DELETE")
            print("the server accepts requests again")
            return 0
        print(f"draining: {client.drain('PUT')} sequences run", flush=True)
        is_idle = wait_until_idle(lambda: client.drain("GET"), options.limit_s, lambda: False)
        print("no request runs" if is_idle else f"requests still run after {options.limit_s:g} s", flush=True)
    except ServingError as error:
        print_error(f"error: {error}")
        return 2
    return 0 if is_idle else 1


if __name__ == "__main__":
    sys.exit(main())
