"""`python -m launcher.reload`: restart a running server, behind a drain, with its deployment file as it is now.

A file that cannot be served is refused; the server then continues as before. Requests that run get
SPECSERVE_STOP_LIMIT_S to end; new ones are refused until the server is ready again. SIGHUP does the same.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from launcher.drain import LauncherClient
from launcher.log import print_error
from launcher.settings import LauncherSettings
from orchestrator.core.errors import ServingError

_EPILOG = """\
environment:
  SPECSERVE_HEALTH_PORT, SPECSERVE_HOST
      where the launcher answers (8003, 127.0.0.1): the values that it was started with

exit status: 0 the settings are in effect, 1 they were refused or could not be loaded, 2 no launcher answered
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Restart; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="launcher.reload",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--limit-s", type=float, default=300.0, metavar="S", help="how long to wait (default: 300)")
    options = parser.parse_args(arguments)
    try:
        settings = LauncherSettings.from_environment(os.environ)
        status, text = LauncherClient(settings.host, settings.health_port).request("PUT", "/reload", options.limit_s)
    except ServingError as error:
        print_error(f"error: {error}")
        return 2
    print(text, file=sys.stderr if status != 200 else sys.stdout, flush=True)
    return 0 if status == 200 else 1


if __name__ == "__main__":
    sys.exit(main())
