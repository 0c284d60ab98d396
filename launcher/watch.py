"""Watches a server's processes: Triton keeps reporting a dead stub as ready and does not restart it (triton#8604).

A process that is alive but silent (stopped, or stuck in a pass or a lock) is killed, and its model is reloaded as if it
had died. Triton itself aborts when a process dies that holds one of its locks in shared memory (triton#8882); then it
is started again. After many deaths it is replaced (launcher.wear).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from launcher.admin import ANSWER_LIMIT_S, Admin, AdminError, NoAnswer
from launcher.triton_process import TritonProcess
from launcher.wear import Wear
from orchestrator.core.deployment.heartbeat import last_beat, take_replacement_request
from orchestrator.core.deployment.stubs import is_alive, living_stubs
from orchestrator.core.errors import ServingError

_POLL_S = 0.5
#: When a process counts as silent; how long a killed one may take to end, and how often to check whether it has.
_SILENT_S, _KILL_LIMIT_S, _KILL_POLL_S = 3.0, 5.0, 0.02
_WINDOW_S = 60.0
#: Within the window: after how many failed reloads, and after more than how many deaths of one model, the watch gives
#: up.
_FAILURES, _DEATHS = 2, 4
#: How often Triton may be started again, and within how many seconds.
_STARTS, _STARTS_WINDOW_S = 3, 600.0
#: How long a reload may take: a multiple of the server's start time, but at least this long.
_RELOAD_FACTOR, _RELOAD_AT_LEAST_S = 4.0, 60.0
#: Pause between a failed start and the next.
_RETRY_S = 2.0


class Silence:
    """Counts for how many polls in a row each process has been silent.

    Because it counts polls and reads no clock, it blames no process if the launcher was stopped or the machine slept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last: dict[psutil.Process, tuple[bytes, int]] = {}

    def poll(self, process: psutil.Process) -> int:
        """Read a process's heartbeat; return for how many polls in a row it has not beaten, 0 if it never has."""
        beat = last_beat(self._folder, process.pid)
        if beat is None:
            return 0
        before, count = self._last.get(process, (b"", 0))
        self._last[process] = beat, (count + 1 if beat == before else 0)
        return self._last[process][1]


def reload_limit_s(started_in_s: float, ready_limit_s: float) -> float:
    """Return how long reloading the model of a dead process may take before Triton counts as stuck.

    started_in_s: how long the server took to start, which loaded all its models while no requests ran.
    """
    return min(ready_limit_s, max(_RELOAD_FACTOR * started_in_s, _RELOAD_AT_LEAST_S))


class Watch(threading.Thread):
    """Reloads models whose process has died or is silent, and restarts Triton; gives up when that does not help.

    Attributes:
        failure: why it gave up, in one line; None while all is well.
        is_starting: Triton has ended and is being started again.
        num_errors: number of polls that raised an exception; the watch continues after each.
    """

    def __init__(
        self,
        triton: TritonProcess,
        python_models: Iterable[str],
        admin: Admin,
        *,
        say: Callable[[str], None],
        load_limit_s: float,
        heartbeats: Path,
        hang_limit_s: float,
        wear: Wear,
    ) -> None:
        """heartbeats: the folder of the processes' heartbeats. hang_limit_s: how long a process may be silent.

        load_limit_s: how long reloading a model may take. wear: says when to replace a Triton that still works.
        """
        super().__init__(name="watch", daemon=True)
        self.failure: str | None = None
        self.is_starting = False
        self.num_errors = 0
        self._triton, self._admin, self._say = triton, admin, say
        self._python_models = set(python_models)
        self._load_limit_s, self._hang_limit_s = load_limit_s, hang_limit_s
        self._folder, self._silence, self._wear = heartbeats, Silence(heartbeats), wear
        self._silent: dict[str, float] = {}
        self._ended = threading.Event()
        self._deaths: dict[str, deque[float]] = defaultdict(deque)
        self._failures: deque[float] = deque()
        self._starts: deque[float] = deque()
        self._unanswered_s = 0.0
        self._stubs = self._living_stubs()

    def end(self) -> None:
        """Stop watching; a reload under way is not waited for."""
        self._ended.set()

    def run(self) -> None:
        """Poll until `end` or a failure."""
        while self.failure is None and not self._ended.wait(_POLL_S):
            try:
                self._end_silent_server()
                if ended := self._triton.why_ended():
                    self._start_again(ended)
                self._end_silent()
                for model in sorted(self.dead_models()):
                    self._heal(model)
                self._replace_worn()
                self._replace_server()
            except Exception as error:
                self.num_errors += 1
                self._say(f"watching the models' processes failed {self.num_errors} times, continuing: {error!r}")

    def why_not_live(self) -> str | None:
        """Return in one line why the server must be restarted, None if it need not be."""
        if self.failure or self.is_starting:
            return self.failure
        if not self.is_alive():
            return "nothing watches the models' processes any more"
        return None if self._admin.is_live() else "Triton does not answer over HTTP"

    def why_not_ready(self) -> str | None:
        """Return in one line why the processes take no requests now, None if they take them."""
        if self.is_starting:
            return "the server has ended and is being started again"
        if dead := self.dead_models():
            return f"no process runs the model {', '.join(sorted(dead))}"
        silent = [f"model {model} has been silent for {since_s:g} s" for model, since_s in self.silent_models().items()]
        return ", ".join(silent) or None

    def kill(self, pid: int) -> None:
        """Kill the process of a model, which is then replaced like any that dies; for other threads."""
        for process in list(self._stubs):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.pid == pid:
                    process.kill()

    def dead_models(self) -> set[str]:
        """Return the models without a living process, including those whose process died before it was seen."""
        return self._python_models - {model for process, model in self._stubs.items() if is_alive(process)}

    def silent_models(self) -> dict[str, float]:
        """Return {model: seconds for which its process has been silent}, without those that missed only a few beats."""
        return dict(self._silent)

    def _end_silent_server(self) -> None:
        """Kill a Triton that has not answered for too long.

        A poll may take no time, if the launcher itself fails (no file descriptor left), and at most the limit for an
        answer; if the launcher was stopped during a poll, only that limit is counted.
        """
        began_s = time.monotonic()
        if self._triton.pid is None or self._admin.is_live():
            self._unanswered_s = 0.0
            return
        self._unanswered_s += _POLL_S + min(time.monotonic() - began_s, ANSWER_LIMIT_S)
        if self._unanswered_s >= self._hang_limit_s and self._triton.pid is not None:
            self._say(f"Triton has not answered for {self._unanswered_s:.1f} s, killing it (SPECSERVE_HANG_LIMIT_S)")
            self._triton.kill()

    def _start_again(self, ended: str) -> None:
        """Start Triton again if a signal has ended it. ended: how and why it ended."""
        if self._triton.is_killed:
            self._start(ended)
        else:
            self.failure = ended

    def _replace_server(self) -> None:
        """Start another Triton in place of one that works but is worn out."""
        if self.failure or self._triton.pid is None or not (why := self._wear.why_replace()):
            return
        self._say(f"{why}; replacing Triton")
        try:
            if self._wear.finish_requests():
                self.is_starting = True
                self._triton.kill()  # not SIGTERM: it would wait for the requests of the dead processes
                self._start(None)
        finally:
            self._wear.accept_requests()

    def _start(self, ended: str | None) -> None:
        """Start Triton, unless that has been done too often. ended: how and why it ended; None if it is replaced.

        A failed start counts too, and another follows: a port may be taken briefly, or the new process killed at once.
        The first start in a replacement does not count.
        """
        self.is_starting = True
        try:
            while not self._ended.is_set() and (ended is None or _count(self._starts, _STARTS_WINDOW_S) <= _STARTS):
                if ended is not None:
                    self._say(f"{ended}; starting it again")
                started_s = time.monotonic()
                try:
                    self._triton.start()
                    self._say(f"the server is ready again after {time.monotonic() - started_s:.1f} s")
                    break
                except (ServingError, OSError) as error:
                    ended = str(error)
                    self._ended.wait(_RETRY_S)
            else:
                self.failure = ended
            self._stubs, self._silent = self._living_stubs(), {}
            self._wear.restart()
        finally:
            self.is_starting = False  # after an unexpected error, too: the next poll looks again

    def _living_stubs(self) -> dict[psutil.Process, str]:
        return living_stubs(server) if (server := self._triton.pid) else {}

    def _end_silent(self) -> None:
        """Kill the processes that have been silent for too long."""
        for process, model in self._stubs.items():
            silent_s = self._silence.poll(process) * _POLL_S if is_alive(process) else 0.0
            self._silent.pop(model, None)
            if silent_s >= self._hang_limit_s:
                self._say(
                    f"model {model}: its process has been silent for {silent_s:g} s, killing it "
                    "(SPECSERVE_HANG_LIMIT_S)"
                )
                self._kill(process)
            elif silent_s >= _SILENT_S:
                self._silent[model] = silent_s

    def _kill(self, process: psutil.Process) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
        end_s = time.monotonic() + _KILL_LIMIT_S
        while is_alive(process) and time.monotonic() < end_s:  # not wait(): Triton does not reap it
            time.sleep(_KILL_POLL_S)

    def _heal(self, model: str) -> None:
        if self._triton.pid is None or self._unanswered_s:  # it ends, or starts with all its models
            return
        if _count(self._deaths[model]) > _DEATHS:
            self.failure = f"model {model} died {_DEATHS + 1} times within a minute"
        if self.failure or self._ended.is_set():
            return
        self._reload(model, "its process died")

    def _replace_worn(self) -> None:
        """Replace the processes that have asked to be replaced and have no requests left."""
        for process, model in list(self._stubs.items()):
            if self.failure or self._ended.is_set() or self._triton.pid is None:
                return
            asks = is_alive(process) and take_replacement_request(self._folder, process.pid)
            if asks and self._reload(model, "its process asks to be replaced"):
                self._kill(process)

    def _reload(self, model: str, why: str) -> bool:
        """Reload a model; return whether it has a new process."""
        self._wear.note_death()
        self._say(f"model {model}: {why}, reloading")
        started_s = time.monotonic()
        try:
            self._admin.reload(model, self._load_limit_s)
            self._say(f"model {model}: reloaded in {time.monotonic() - started_s:.1f} s")
            return True
        except NoAnswer as error:
            # A process that dies with a lock in shared memory may leave Triton stuck instead of aborted (triton#8882).
            if not self._ended.is_set():
                self._say(f"model {model} could not be reloaded: {error}; killing Triton")
                self._triton.kill()
        except AdminError as error:
            self._note_failure(f"model {model} could not be reloaded: {error}")
        finally:
            self._stubs = self._living_stubs()
        return False

    def _note_failure(self, message: str) -> None:
        if self._ended.is_set() or not self._admin.is_live():  # a server that ends refuses reloads
            return
        if _count(self._failures) >= _FAILURES:
            self.failure = message
        else:
            self._say(f"{message}; trying once more")


def _count(times: deque[float], window_s: float = _WINDOW_S) -> int:
    """Record an event now; return how many there were within the window."""
    now_s = time.monotonic()
    times.append(now_s)
    while now_s - times[0] > window_s:
        times.popleft()
    return len(times)
