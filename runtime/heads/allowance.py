"""When a draft stops growing: any level makes a legal tree, and a late one makes none."""

from __future__ import annotations

import time

from orchestrator.wire import DraftRequest
from runtime.job import Job

#: Of the time that a call is given: what its answer needs for the way back, …
MARGIN = 0.1
#: … and what one pass may take of it, so that a call that arrives meanwhile finds time left for its own.
SHARE = 0.5


class Allowance:
    """The time that one pass has; it begins with it."""

    def __init__(self) -> None:
        self._began_s = self._level_began_s = time.monotonic()
        self._longest_s = 0.0

    def begin_levels(self) -> None:
        """Note that the context is read: what that took is no measure of a level."""
        self._level_began_s = time.monotonic()

    def note_level(self) -> None:
        """Note that a level of the trees has been grown; the next is reckoned to take as long as the longest did."""
        now_s = time.monotonic()
        self._longest_s = max(self._longest_s, now_s - self._level_began_s)
        self._level_began_s = now_s

    def allows(self, job: Job[DraftRequest]) -> bool:
        """Return whether another level of the job's tree would be in time."""
        given_s = job.deadline_s - job.arrived_s
        end_s = min(job.deadline_s - MARGIN * given_s, self._began_s + SHARE * given_s)
        return self._level_began_s + self._longest_s <= end_s
