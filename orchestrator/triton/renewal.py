"""Has the process of a public model replaced before calls that are never answered hold all its threads.

Triton makes the nested calls of a Python model, and sends its responses, on a fixed number of threads of its own. A
call that a process had taken when it died is never answered, and holds its thread for ever. Once all are held the model
is silent, though its process works (seen with 2.51: two deaths of `target` under 32 requests each).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from orchestrator.core.errors import Unavailable

log = logging.getLogger(__name__)

#: The threads of a model, where the launcher does not set their number.
DEFAULT_THREADS = 32
_POLL_S = 0.5


class Renewal:
    """Watches the threads that Triton has for this process; refuses requests and asks for an heir when few are left.

    num_threads: there are. num_lost: returns how many of them calls hold that are never answered. num_running,
    max_running: return how many requests run, and how many may run: each has a call and a response under way at most.
    ask_for_heir: has another process put in the place of this one; limit_s: how long requests that run get to end
    before that.
    """

    def __init__(
        self,
        num_threads: int,
        num_lost: Callable[[], int],
        num_running: Callable[[], int],
        max_running: Callable[[], int],
        ask_for_heir: Callable[[], None],
        limit_s: float,
    ) -> None:
        self._num_threads, self._num_lost = num_threads, num_lost
        self._num_running, self._max_running = num_running, max_running
        self._ask_for_heir, self._limit_s = ask_for_heir, limit_s
        self._is_due = False

    def start(self) -> None:
        """Watch from a thread of its own, for ever."""
        threading.Thread(target=self._watch, name="renewal", daemon=True).start()

    def check(self) -> None:
        """Raise Unavailable when the process takes no further request, because another is about to take its place."""
        if self._is_due:
            raise Unavailable("the model's process is about to be started anew; try again in a few seconds")

    def _watch(self) -> None:
        while not self._lacks_threads:
            time.sleep(_POLL_S)
        self._is_due = True
        log.warning(
            "%d of %d threads are held by calls that no process will answer: another process takes its place",
            self._num_lost(),
            self._num_threads,
        )
        end_s = time.monotonic() + self._limit_s
        while self._num_running() and time.monotonic() < end_s:
            time.sleep(_POLL_S)
        self._ask_for_heir()

    @property
    def _lacks_threads(self) -> bool:
        num_lost = self._num_lost()
        return num_lost > 0 and self._num_threads - num_lost < 2 * self._max_running()
