"""The watchdog of a server's processes, which Triton itself does not repair (triton#8604, #8882).

- A model whose process has died is loaded again.
- A Triton that a signal has ended, or that has generated no token though asked for one twice, is started again.
- After many deaths, each of which leaves threads and memory in Triton, it is restarted as soon as no request runs.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future

import psutil

from launcher.admin import Admin, AdminError
from launcher.probe import Probe
from launcher.triton_process import TritonProcess
from orchestrator.core.deployment.drain_state import Drain, finish_requests
from orchestrator.core.deployment.stubs import is_alive, living_stubs
from orchestrator.core.errors import ServingError

_POLL_S = 0.5
#: How many probes for a token must fail in a row.
_NUM_PROBES = 2
#: The watchdog gives up when a model dies more often than this within the window.
_DEATHS, _DEATHS_WINDOW_S = 4, 60.0
#: How often Triton may be started again within the window, and the pause between a failed start and the next.
_STARTS, _STARTS_WINDOW_S, _RETRY_S = 3, 600.0, 2.0
#: How long a reload may take: a multiple of the server's start time, but at least this long.
_RELOAD_FACTOR, _RELOAD_AT_LEAST_S = 4.0, 60.0
#: After so many deaths Triton is restarted when this many polls in a row have found no running request.
WORN_DEATHS, _IDLE_POLLS = 16, 3
#: How long a restart of an idle Triton waits for requests that came since.
_IDLE_LIMIT_S = 1.0


def reload_limit_s(started_in_s: float, ready_limit_s: float) -> float:
    """Return how long reloading the model of a dead process may take before Triton counts as stuck.

    started_in_s: how long the server took to start, which loaded all its models while no requests ran.
    """
    return min(ready_limit_s, max(_RELOAD_FACTOR * started_in_s, _RELOAD_AT_LEAST_S))


class ProcessWatchdog(threading.Thread):
    """Reloads models whose process has died, and restarts Triton; gives up when that does not help.

    load_limit_s: how long reloading a model may take. stop_limit_s: how long running requests get before a restart that
    was asked for. probe_period_s: the pause between two probes for a token.

    Attributes:
        failure: why it gave up, in one line; None while all is well.
        is_starting: Triton has ended and is being started again.
        num_errors: number of polls that raised an exception; the watchdog continues after each.
    """

    def __init__(
        self,
        triton: TritonProcess,
        python_models: Iterable[str],
        admin: Admin,
        probe: Probe,
        drain: Drain,
        *,
        say: Callable[[str], None],
        load_limit_s: float,
        stop_limit_s: float,
        probe_period_s: float,
    ) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.failure: str | None = None
        self.is_starting = False
        self.num_errors = 0
        self._triton, self._admin, self._probe, self._drain, self._say = triton, admin, probe, drain, say
        self._python_models = set(python_models)
        self._load_limit_s, self._stop_limit_s, self._probe_period_s = load_limit_s, stop_limit_s, probe_period_s
        self._ended = threading.Event()
        self._deaths: dict[str, deque[float]] = defaultdict(deque)
        self._starts: deque[float] = deque()
        self._num_deaths = self._num_idle = 0
        self._restarts: queue.SimpleQueue[tuple[Callable[[], Iterable[str]], Future[None]]] = queue.SimpleQueue()
        self._stubs = self._living_stubs()

    def end(self) -> None:
        """Stop watching; a reload under way is not waited for."""
        self._ended.set()

    def run(self) -> None:
        """Poll until `end` or a failure."""
        threading.Thread(target=self._probe_often, name="token probe", daemon=True).start()
        while self.failure is None and not self._ended.wait(_POLL_S):
            try:
                self._poll()
            except Exception as error:
                self.num_errors += 1
                self._say(f"watching the models' processes failed {self.num_errors} times, continuing: {error!r}")

    def why_not_live(self) -> str | None:
        """Return in one line why the server must be restarted, None if it need not be."""
        if self.failure or self.is_starting or self._triton.is_killed:
            return self.failure
        if not self.is_alive():
            return "nothing watches the models' processes any more"
        return None if self._admin.is_live() else "Triton does not answer over HTTP"

    def why_not_ready(self) -> str | None:
        """Return in one line why the processes take no requests now, None if they take them."""
        if self.is_starting or self._triton.is_killed:
            return "the server has ended and is being started again"
        dead = self.dead_models()
        return f"no process runs the model {', '.join(sorted(dead))}" if dead else None

    def dead_models(self) -> set[str]:
        """Return the models without a living process, including those whose process died before it was seen."""
        return self._python_models - {model for process, model in self._stubs.items() if is_alive(process)}

    def restart(self, change: Callable[[], Iterable[str]]) -> None:
        """Restart Triton behind a drain, and wait until it is ready; for other threads.

        change: called while no Triton runs, to set what the next one is started with; returns its models in Python.
        Raises ServingError if Triton does not come up again; the watchdog then gives up.
        """
        done: Future[None] = Future()
        self._restarts.put((change, done))
        while True:
            try:
                return done.result(_POLL_S)
            except TimeoutError:
                if not self.is_alive():
                    raise ServingError(self.failure or "the server is being stopped") from None

    def _poll(self) -> None:
        if ended := self._triton.why_ended():
            if self._triton.is_killed:
                self._start(ended)
            else:
                self.failure = ended
            return
        for model in sorted(self.dead_models()):
            self._heal(model)
        if not self._restarts.empty():
            self._restart_as_asked(*self._restarts.get())
        self._restart_if_worn()

    def _heal(self, model: str) -> None:
        """Load a model again whose process has died; if Triton cannot, end it, which starts all of them again."""
        if self._ended.is_set() or self.failure or not self._admin.is_live():  # a Triton that ends is started again
            return
        if _count(self._deaths[model], _DEATHS_WINDOW_S) > _DEATHS:
            self.failure = f"model {model} died {_DEATHS + 1} times within a minute"
            return
        self._num_deaths += 1
        self._say(f"model {model}: its process died, reloading")
        started_s = time.monotonic()
        try:
            self._admin.reload(model, self._load_limit_s)
            self._say(f"model {model}: reloaded in {time.monotonic() - started_s:.1f} s")
        except AdminError as error:
            # A process that dies with a lock in shared memory may leave Triton stuck instead of aborted (triton#8882).
            if not self._ended.is_set() and self._admin.is_live():
                self._say(f"model {model} could not be reloaded: {error}; killing Triton")
                self._triton.kill()
        finally:
            self._stubs = self._living_stubs()

    def _restart_as_asked(self, change: Callable[[], Iterable[str]], done: Future[None]) -> None:
        """Carry out `restart`."""
        error: BaseException | None = None
        try:
            finish_requests(self._drain, self._stop_limit_s, self._ended.is_set, self._say)
            self.is_starting = True
            self._triton.kill()  # not SIGTERM: it would wait for the connections of idle clients
            self._python_models = set(change())
            self._start(None, retries=False)
            error = ServingError(self.failure) if self.failure else None
        except BaseException as raised:
            error = raised
        self._drain.cancel()
        done.set_exception(error) if error else done.set_result(None)

    def _restart_if_worn(self) -> None:
        """Restart Triton if many processes have died in it and no request runs."""
        if self.failure or self._num_deaths < WORN_DEATHS or self._ended.is_set():
            return
        self._num_idle = 0 if self._drain.num_running() else self._num_idle + 1
        if self._num_idle < _IDLE_POLLS:
            return
        self._num_idle = 0
        try:
            if finish_requests(self._drain, _IDLE_LIMIT_S, self._ended.is_set, lambda _: None):
                self._say(f"{self._num_deaths} processes have died in Triton, and no request runs: restarting it")
                self.is_starting = True
                self._triton.kill()
                self._start(None)
        finally:
            self._drain.cancel()

    def _start(self, ended: str | None, retries: bool = True) -> None:
        """Start Triton, unless that has been done too often. ended: how and why it ended; None if that was our wish.

        A failed start counts too, and another follows if `retries`: a port may be taken briefly, or the new process
        killed at once.
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
                    if not retries:
                        self.failure = ended
                        break
                    self._ended.wait(_RETRY_S)
            else:
                self.failure = ended
            self._stubs, self._num_deaths = self._living_stubs(), 0
        finally:
            self.is_starting = False  # after an unexpected error, too: the next poll looks again

    def _probe_often(self) -> None:
        """Kill a Triton that is ready by all other signs, but generates no token."""
        num_failed = 0
        while self.failure is None and not self._ended.wait(self._probe_period_s):
            try:
                why = None if self.why_not_ready() else self._probe.why_no_token()
            except Exception as error:  # whatever the server sent, the next probe may understand it
                self._say(f"asking the server for a token failed, continuing: {error!r}")
                continue
            num_failed = num_failed + 1 if why and not self.why_not_ready() else 0
            if num_failed == _NUM_PROBES and not self._ended.is_set():
                self._say(f"{why}, for the second time; killing Triton (SPECSERVE_HANG_LIMIT_S)")
                self._triton.kill()
                num_failed = 0

    def _living_stubs(self) -> dict[psutil.Process, str]:
        return living_stubs(server) if (server := self._triton.pid) else {}


def _count(times: deque[float], window_s: float) -> int:
    """Record an event now; return how many there were within the window."""
    now_s = time.monotonic()
    times.append(now_s)
    while now_s - times[0] > window_s:
        times.popleft()
    return len(times)
