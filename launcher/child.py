"""`python child.py PARENT COMMAND…`: become COMMAND, which gets SIGTERM when the thread that started it ends.

It may open as many files as the system allows: Triton never releases the sockets of some cancelled streams.

It is a separate program because no Python code may run between fork and exec (`preexec_fn`): if the launcher's process
uses gRPC, gRPC's fork handlers run there too, and wait for threads that a fork does not copy.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Set the signal and the limit and become the command, unless the parent has already ended."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == parent:
        os.execvp(command[0], command)


if __name__ == "__main__":
    main()
