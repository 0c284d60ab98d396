"""Has the process of a public model replaced before calls that are never answered block all its threads.

Triton makes the nested calls of a Python model, and sends its responses, on a fixed number of threads of its own. A
call that a process had taken when it died is never answered, and blocks its thread forever. Once all are blocked the
model is silent, although its process works (seen with 2.51: two deaths of `target` under 32 requests each).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.core.errors import Draining

log = logging.getLogger(__name__)

_POLL_S = 0.5
#: This many polls in a row must agree: for a moment after a restart, calls to the new process count as lost, too.
POLLS = 5
#: How often a process that has not been replaced asks again.
ASK_AGAIN_S = 10.0
#: Threads for each request that may run: with fewer than WORN, the process is replaced once it is idle; with fewer than
#: CRITICAL, it takes no more requests until then.
WORN, CRITICAL = 2.0, 1.5


@dataclass(frozen=True, kw_only=True)
class Load:
    """The load of a public model's process.

    num_lost: its calls that will never be answered. num_requests: its requests that run or wait. max_running: how many
    may run. latest_deadline_s: when all its requests will have been answered, by time.monotonic().
    """

    num_lost: int
    num_requests: int
    max_running: int
    latest_deadline_s: float


class Renewal:
    """Watches the threads that Triton has for this process, and asks for a replacement when few are left.

    num_threads: how many there are. load: returns the present load. ask_for_replacement: has another process take the
    place of this one, which is then killed.
    Invariant: the process is replaced when no request runs or waits, and refuses new ones from then on. When very few
    threads are left it refuses them earlier, and is replaced at the latest when all its requests are past their
    deadline.
    """

    def __init__(self, num_threads: int, load: Callable[[], Load], ask_for_replacement: Callable[[], None]) -> None:
        self._num_threads, self._load, self._ask_for_replacement = num_threads, load, ask_for_replacement
        self._num_worn = self._num_idle = 0
        self._asked_s = float("-inf")
        self.refuses = False

    def start(self) -> None:
        """Start watching, on a thread of its own."""
        threading.Thread(target=self._watch, name="renewal", daemon=True).start()

    def check(self) -> None:
        """Raise Draining when the process takes no more requests, because another is about to take its place."""
        if self.refuses:
            raise Draining("the model's process is about to be restarted; try again in a few seconds")

    def _watch(self) -> None:
        while True:
            time.sleep(_POLL_S)
            try:
                self._check_load()
            except Exception:  # no descriptor, or a full disk: the next poll may succeed
                log.exception("this process could not count its lost calls, or ask for a replacement; it tries again")

    def _check_load(self) -> None:
        load = self._load()
        num_left = self._num_threads - load.num_lost
        is_worn = load.num_lost > 0 and num_left < WORN * load.max_running
        self._num_worn = self._num_worn + 1 if is_worn else 0
        if self._num_worn < POLLS and not self.refuses:
            return
        if not self.refuses and (not load.num_requests or num_left < CRITICAL * load.max_running):
            log.warning(
                "%d of %d threads wait for dead processes: another process takes over", load.num_lost, self._num_threads
            )
            self.refuses = True
        # A request that was accepted before the first refusal may not be counted yet.
        self._num_idle = self._num_idle + 1 if self.refuses and not load.num_requests else 0
        now_s = time.monotonic()
        may_end = self._num_idle > 1 or now_s > load.latest_deadline_s
        if self.refuses and may_end and now_s - self._asked_s >= ASK_AGAIN_S:
            self._ask_for_replacement()
            self._asked_s = now_s
