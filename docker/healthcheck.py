"""Exit status 0 while the server, or the gateway, in this container says that it is ready, else 1; stdlib only.

`healthcheck.py server` asks the launcher (SPECSERVE_HOST, SPECSERVE_HEALTH_PORT): it watches the processes of the
models, which Triton calls ready for ever. `healthcheck.py gateway` asks the gateway (GATEWAY_HOST, GATEWAY_PORT).
"""

from __future__ import annotations

import http.client
import os
import sys
from collections.abc import Mapping

_LIMIT_S = 5.0
#: What is asked → the variable of its address, the variable of its port, the port.
_WHERE = {
    "server": ("SPECSERVE_HOST", "SPECSERVE_HEALTH_PORT", 8003),
    "gateway": ("GATEWAY_HOST", "GATEWAY_PORT", 9000),
}


def is_ready(what: str, environ: Mapping[str, str]) -> bool:
    """Ask for the readiness, where the environment says that the server or the gateway listens."""
    host_variable, port_variable, port = _WHERE[what]
    host = environ.get(host_variable) or "127.0.0.1"
    connection = http.client.HTTPConnection(
        "127.0.0.1" if host == "0.0.0.0" else host, int(environ.get(port_variable) or port), timeout=_LIMIT_S
    )
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(0 if is_ready(sys.argv[1], os.environ) else 1)
