"""How many threads a pass takes: learnt from the passes themselves, since it depends on what else the machine does."""

from __future__ import annotations

import os

#: After so many passes of a size, a number beside the best is tried again: the machine may have become idle or busy.
TRIAL_INTERVAL = 32
#: The part of the newest time in an average.
NEWEST = 0.25
#: A trial that is this many times slower than the best is repeated half as often.
SLOW = 1.5


def available_threads() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ThreadChoice:
    """Chooses the number of threads of each pass, 1, 2, 4, … up to `most`, by its average time in passes of that size.

    Averages, not minima: a second thread that is at times held up by other work is worth less. Nothing that a pass
    computes depends on the choice.
    """

    def __init__(self, most: int) -> None:
        self._numbers = [1 << power for power in range(max(most, 1).bit_length())]
        self._sizes: dict[int, _Size] = {}

    def choose(self, num_rows: int) -> int:
        """Return the number of threads for a pass of `num_rows` rows."""
        return self._numbers[self._size(num_rows).choose()]

    def best(self, num_rows: int) -> int:
        """Return the number that has been the best so far."""
        return self._numbers[self._size(num_rows).best]

    def observe(self, num_rows: int, num_threads: int, seconds: float) -> None:
        """Count a pass that took `seconds`."""
        self._size(num_rows).observe(self._numbers.index(num_threads), seconds / num_rows)

    def _size(self, num_rows: int) -> _Size:
        return self._sizes.setdefault(num_rows.bit_length(), _Size(len(self._numbers)))


class _Size:
    """What is known of passes of about one number of rows; times are seconds a row, by place in the numbers."""

    def __init__(self, count: int) -> None:
        self._times_s: list[float | None] = [None] * count
        self._waits = [0] * count
        self.best = 0

    def choose(self) -> int:
        """Return the best place or, now and then, one beside it; a place without a time comes first."""
        beside = [place for place in (self.best - 1, self.best + 1) if 0 <= place < len(self._times_s)]
        for place in beside:
            if self._times_s[self.best] is not None and self._waits[place] < 0:
                return place
        return self.best

    def observe(self, place: int, seconds: float) -> None:
        """Update the average of a place, and which place is the best."""
        for other in (self.best - 1, self.best + 1):
            if 0 <= other < len(self._waits) and other != place:
                self._waits[other] -= 1
        before = self._times_s[place]
        self._times_s[place] = now = seconds if before is None else before + NEWEST * (seconds - before)
        known = [(time_s, other) for other, time_s in enumerate(self._times_s) if time_s is not None]
        least, self.best = min(known)
        # The first time holds what is paid once, so it is measured again soon.
        self._waits[place] = 1 if before is None else TRIAL_INTERVAL * (2 if now > SLOW * least else 1)
