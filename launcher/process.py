"""Starts a process group that dies with us, looks into it, ends it within a limit; knows Linux, not Triton."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class Stat(NamedTuple):
    """What /proc says about a process."""

    pid: int
    name: str
    state: str
    parent: int
    group: int


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
        gentle = True
    except subprocess.TimeoutExpired:
        gentle = False
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    _await_group_end(process.pid, 5.0)
    return gentle


def _await_group_end(group: int, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while group_members(group) and time.monotonic() < end:
        time.sleep(0.02)
        with contextlib.suppress(ChildProcessError):  # in a container we may be their init
            os.waitpid(-group, os.WNOHANG)


def group_members(group: int) -> list[Stat]:
    """Return the living processes of a group."""
    found = (stat(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [s for s in found if s and s.group == group and s.state not in "ZX"]


def stat(pid: int) -> Stat | None:
    """Return what /proc says about `pid`, or None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")  # a name may hold spaces and brackets
    state, parent, group = rest.split()[:3]
    return Stat(pid, name, state, int(parent), int(group))


def arguments(pid: int) -> list[str]:
    """Return a process's command line; empty when it is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []
