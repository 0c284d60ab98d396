"""Starts a process group that dies with us, and ends it within a limit; knows Linux, not Triton."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from orchestrator.deployment.stubs import is_alive

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def spawn(command: list[str], environ: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start `command` as the leader of its own group, output to `log`; it gets SIGTERM when the calling thread ends."""
    parent = os.getpid()

    def die_with_parent() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the call above
            os._exit(1)

    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal is the launcher's to handle
            preexec_fn=die_with_parent,
        )


def stop(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """End a process and its group: SIGTERM, after `limit_s` SIGKILL. Returns whether SIGTERM was enough."""
    process.terminate()
    try:
        process.wait(limit_s)
        was_enough = True
    except subprocess.TimeoutExpired:
        was_enough = False
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    end_s = time.monotonic() + 5.0
    while group_members(process.pid) and time.monotonic() < end_s:
        time.sleep(0.02)
        with contextlib.suppress(ChildProcessError):  # in a container we may be their init
            os.waitpid(-process.pid, os.WNOHANG)
    return was_enough


def group_members(group: int) -> list[int]:
    """Return the ids of the living processes of a group."""
    return [process.pid for process in psutil.process_iter() if _group_of(process.pid) == group and is_alive(process)]


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1
