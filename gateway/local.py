"""Replicas on this machine: launchers that the gateway's command starts, watches, restarts and stops."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from gateway.errors import abbreviated
from gateway.settings import SettingsError

_GRPC = re.compile(r"gRPC (\S+?),")
#: Variables of the launcher, in the order in which its ready line shows the ports.
PORTS = tuple(f"SPECSERVE_{port}_PORT" for port in ("HTTP", "GRPC", "METRICS", "HEALTH"))
#: The launcher's program that becomes a command which ends with its parent. It is run, not imported: the gateway's
#: image has no launcher, since it starts no servers.
_CHILD = Path(__file__).resolve().parents[1] / "launcher/child.py"
#: The pause before a launcher is started again, and the longest one: each failure in a row doubles it.
RESTART_PAUSE_S = 1.0
MAX_RESTART_PAUSE_S = 30.0
#: When a launcher ends that has run for this long, failures are counted anew. A load may take minutes before it fails.
SOUND_S = 300.0
STOP_LIMIT_S = 30

log = logging.getLogger(__name__)


class LocalReplica:
    """One launcher, started again when it ends; its ports stay the same."""

    def __init__(self, config: Path, environ: Mapping[str, str]) -> None:
        self._command = [sys.executable, "-m", "launcher", str(config)]
        self._environ = dict(environ)
        self._stopping = threading.Event()
        self.address = ""
        self.process = self._start()

    def wait_until_ready(self) -> str:
        """Return the launcher's ready line; raises SettingsError if the launcher ends first, having printed why."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not (found := _GRPC.search(line)):
            raise SettingsError(f"the server did not start (exit status {self.process.wait()})")
        self.address = found[1]
        self._environ |= _ports(line)
        threading.Thread(target=self._watch, daemon=True).start()
        return line.strip()

    def stop(self) -> None:
        """Stop the launcher and wait until it ends; kill it at the limit."""
        self._stopping.set()
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def _start(self) -> subprocess.Popen[str]:
        # In a session of its own, so that Ctrl-C in the terminal reaches only the gateway, whose requests end first.
        # The launcher gets SIGTERM when the thread that starts it ends, so that it does not outlive a gateway that is
        # killed; the main thread and the watching thread live as long as the gateway.
        return subprocess.Popen(
            [sys.executable, "-IS", str(_CHILD), str(os.getpid()), *self._command],
            env=self._environ,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def _watch(self) -> None:
        num_failures = 0
        while True:
            began_s = time.monotonic()
            with self.process as process:  # closes its pipe
                status = process.wait()
            lasted_s = time.monotonic() - began_s
            num_failures = 1 if lasted_s >= SOUND_S else num_failures + 1
            if self._stopping.is_set() or self._stopping.wait(self._report_end(status, lasted_s, num_failures)):
                return
            try:
                self.process = self._start()
            except OSError as error:  # no memory or no further process: the next attempt, after a pause, may succeed
                log.error("the server at %s cannot be started: %s", self.address, error)
                continue
            if self._stopping.is_set():  # asked to stop meanwhile
                self.process.terminate()
                return

    def _report_end(self, status: int, lasted_s: float, num_failures: int) -> float:
        """Log that the launcher ended; return the pause, in seconds, before it is started again."""
        pause_s = restart_pause_s(num_failures)
        log.error(
            "the server at %s ended after %.0f s with exit status %d (failure %d in a row): started again in %g s",
            self.address,
            lasted_s,
            status,
            num_failures,
            pause_s,
        )
        return pause_s


def restart_pause_s(num_failures: int) -> float:
    """Return the pause before a launcher that has failed num_failures times in a row is started again."""
    return float(min(RESTART_PAUSE_S * 2 ** min(num_failures - 1, 10), MAX_RESTART_PAUSE_S))


def _ports(ready_line: str) -> dict[str, str]:
    """Return the variables that make a launcher listen on the ports in its ready line again."""
    return dict(zip(PORTS, re.findall(r":(\d+)", ready_line), strict=False))


@contextlib.contextmanager
def serving(config: str, num_replicas: int) -> Iterator[list[str]]:
    """Start replicas of a deployment one after the other; yield their gRPC addresses; stop them at the end.

    Raises SettingsError if one does not start.
    """
    if num_replicas < 1:
        raise SettingsError(f"at least 1 server must be started, got {num_replicas} (--num-replicas)")
    path = Path(config).absolute()
    environ = dict(os.environ) if num_replicas == 1 else {**os.environ, **dict.fromkeys(PORTS, "0")}
    replicas: list[LocalReplica] = []
    try:
        for _ in range(num_replicas):
            replicas.append(LocalReplica(path, environ))
            print(replicas[-1].wait_until_ready(), flush=True)
        yield [replica.address for replica in replicas]
    finally:
        for replica in replicas:
            replica.stop()


def target_of(config: str) -> str:
    """Return the checkpoint that a deployment serves, as its file or the environment names it; a folder of GGUF's."""
    path = Path(config)
    try:
        declared = tomllib.loads(path.read_text(encoding="utf-8-sig")).get("target", "")
    except (OSError, ValueError) as error:
        raise SettingsError(f"cannot read the deployment {path}: {error} (--serve)") from None
    target = os.environ.get("SERVING_TARGET") or declared
    try:
        local = path.absolute().parent / Path(str(target)).expanduser()
    except RuntimeError as error:
        raise SettingsError(
            f"target {abbreviated(target)} names no folder: {error} ({path}, or SERVING_TARGET)"
        ) from None
    if local.suffix.lower() == ".gguf":
        return _folder_of_gguf(local)
    return str(local) if local.is_dir() else str(target)


def _folder_of_gguf(file: Path) -> str:
    """Return the folder with the tokenizer of a GGUF file, which the server's own code writes."""
    command = [sys.executable, "-m", "orchestrator.core.deployment.gguf_checkpoint", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SettingsError(done.stderr.strip().removeprefix("error: "))
    return done.stdout.strip()
