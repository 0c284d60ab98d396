"""Exit status 0 while the server in this container says that it is ready, else 1; stdlib only.

Triton goes on saying so when the process of a model has died: the launcher watches those, and heals them or exits.
"""

from __future__ import annotations

import http.client
import os
import sys
from collections.abc import Mapping

_LIMIT_S = 5.0


def is_ready(environ: Mapping[str, str]) -> bool:
    """Ask Triton's readiness, where HOST and HTTP_PORT say that it listens."""
    host = environ.get("HOST") or "127.0.0.1"
    connection = http.client.HTTPConnection(
        "127.0.0.1" if host == "0.0.0.0" else host, int(environ.get("HTTP_PORT") or 8000), timeout=_LIMIT_S
    )
    try:
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(0 if is_ready(os.environ) else 1)
