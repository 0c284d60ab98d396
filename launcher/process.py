"""Starts a process group that dies with us, and ends it within a limit; depends on Linux, not on Triton."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from orchestrator.core.deployment.stubs import is_alive

_CHILD = Path(__file__).with_name("child.py")


def spawn(command: list[str], environ: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start `command` as the leader of its own group, output to `log`; it gets SIGTERM when the calling thread ends."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-IS", str(_CHILD), str(os.getpid()), *command],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal is the launcher's to handle
        )


def stop(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """End a process with SIGTERM, or SIGKILL after `limit_s`, and kill its group; return whether SIGTERM was enough."""
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
