"""Watches a server's stub processes: Triton calls a dead stub ready for ever and starts no other (triton#8604).

A process that lives but is silent (stopped, or stuck in a pass or a lock) is killed, and healed as a dead one.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from launcher.admin import Admin, AdminError
from orchestrator.deployment.heartbeat import last_beat
from orchestrator.deployment.stubs import is_alive, living_stubs

_POLL_S = 0.5
#: From when on a process counts as silent, and how long one that was killed may take to go.
_SILENT_S, _KILL_LIMIT_S = 3.0, 5.0
_WINDOW_S = 60.0
#: What may happen within the window: so many reloads may fail, and one model may die so often.
_FAILURES, _DEATHS = 2, 4


class Silence:
    """For how many looks in a row the processes have been silent.

    It counts looks and reads no clock: a launcher that was itself stopped, or a machine that slept, blames nobody.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last: dict[psutil.Process, tuple[bytes, int]] = {}

    def looks(self, process: psutil.Process) -> int:
        """Look once more; return for how many looks a process has not beaten, 0 for one that has never beaten."""
        beat = last_beat(self._folder, process.pid)
        if beat is None:
            return 0
        before, count = self._last.get(process, (b"", 0))
        self._last[process] = beat, (count + 1 if beat == before else 0)
        return self._last[process][1]


class Watch(threading.Thread):
    """Reloads the Python models whose process has died, or is silent; gives up when that does not help.

    Attributes:
        failure: why it gave up, in one line; None while all is well.
        num_errors: how often a look at the processes raised an exception; the watch goes on behind it.
    """

    def __init__(
        self,
        server: int,
        python_models: Iterable[str],
        admin: Admin,
        *,
        say: Callable[[str], None],
        load_limit_s: float,
        heartbeats: Path,
        hang_limit_s: float,
    ) -> None:
        """heartbeats: the folder of the processes' heartbeats. hang_limit_s: how long one may be silent."""
        super().__init__(name="watch", daemon=True)
        self.failure: str | None = None
        self.num_errors = 0
        self._server, self._admin, self._say = server, admin, say
        self._python_models = set(python_models)
        self._load_limit_s, self._hang_limit_s = load_limit_s, hang_limit_s
        self._silence = Silence(heartbeats)
        self._silent: dict[str, float] = {}
        self._ended = threading.Event()
        self._deaths: dict[str, deque[float]] = defaultdict(deque)
        self._failures: deque[float] = deque()
        self._stubs = living_stubs(server)

    def end(self) -> None:
        """Stop watching; a reload under way is not waited for."""
        self._ended.set()

    def run(self) -> None:
        """Poll until `end` or a failure."""
        while self.failure is None and not self._ended.wait(_POLL_S):
            try:
                self._end_silent()
                for model in sorted(self.dead_models()):
                    self._heal(model)
            except Exception as error:
                self.num_errors += 1
                self._say(f"the watch over the models' processes failed {self.num_errors} times, goes on: {error!r}")

    def dead_models(self) -> set[str]:
        """Return the models without a living process, those included that died before they were seen."""
        return self._python_models - {model for process, model in self._stubs.items() if is_alive(process)}

    def silent_models(self) -> dict[str, float]:
        """Return for how many seconds the processes have been silent that miss more than a few beats."""
        return dict(self._silent)

    def _end_silent(self) -> None:
        """Kill the processes that have been silent for too long."""
        for process, model in self._stubs.items():
            silent_s = self._silence.looks(process) * _POLL_S if is_alive(process) else 0.0
            self._silent.pop(model, None)
            if silent_s >= self._hang_limit_s:
                self._say(f"model {model}: its process has been silent for {silent_s:g} s, killing it (HANG_LIMIT_S)")
                process.kill()
                process.wait(_KILL_LIMIT_S)
            elif silent_s >= _SILENT_S:
                self._silent[model] = silent_s

    def _heal(self, model: str) -> None:
        if _count(self._deaths[model]) > _DEATHS:
            self.failure = f"model {model} died {_DEATHS + 1} times within a minute"
        if self.failure or self._ended.is_set():
            return
        self._say(f"model {model}: its process died, reloading")
        started_s = time.monotonic()
        try:
            self._admin.reload(model, self._load_limit_s)
            self._say(f"model {model}: reloaded in {time.monotonic() - started_s:.1f} s")
        except AdminError as error:
            self._note_failure(f"model {model} could not be reloaded: {error}")
        self._stubs = living_stubs(self._server)

    def _note_failure(self, message: str) -> None:
        if self._ended.is_set():  # the server is being stopped: of course it refuses
            return
        if _count(self._failures) >= _FAILURES:
            self.failure = message
        else:
            self._say(f"{message}; trying once more")


def _count(times: deque[float]) -> int:
    """Note that it happened now; return how often it did within the window."""
    now_s = time.monotonic()
    times.append(now_s)
    while now_s - times[0] > _WINDOW_S:
        times.popleft()
    return len(times)
