"""Tells an executor that has died without a word from one that is slow."""

from __future__ import annotations

from dataclasses import dataclass

#: So many deadlines in a row must have passed, and so long, with nothing at all from the executor.
SILENT_CALLS, SILENT_S = 3, 60.0


@dataclass
class Watchdog:
    """What has happened since the executor was heard last; times by time.monotonic().

    Invariant: whatever it answers ends the silence, a cancelled request's last response, too; so a call that is slow alone
    (a long prompt, a long queue) never makes one, while an executor without requests is not silent.
    """

    since_s: float = 0.0
    num_late: int = 0

    def begin(self, now_s: float, *, is_idle: bool) -> None:
        """Note a request; the first that an idle executor gets is where a silence may begin."""
        if is_idle and not self.num_late:
            self.since_s = now_s

    def end(self, now_s: float) -> None:
        """Note that something came."""
        self.since_s, self.num_late = now_s, 0

    def is_lost(self, now_s: float, num_late: int) -> bool:
        """Note calls whose deadline has passed; True when the executor has to be given up."""
        self.num_late += num_late
        return bool(num_late) and self.num_late >= SILENT_CALLS and now_s - self.since_s >= SILENT_S
