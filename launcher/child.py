"""`python child.py PARENT COMMAND…`: becomes COMMAND, which gets SIGTERM when the thread that started it ends.

It is a program of its own because no code of ours may run between fork and exec (`preexec_fn`): the handlers of a gRPC
that the launcher's process uses run there too, and wait for threads that a fork does not copy.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Set the signal, look whether the parent has ended before that, and become the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == parent:
        os.execvp(command[0], command)


if __name__ == "__main__":
    main()
