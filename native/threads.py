"""How many threads a pass gets: learnt from the passes themselves, since it depends on what else the machine does."""

from __future__ import annotations

import os

#: A neighbour of the best number is tried again after this many passes of a size: the machine may have become idle or
#: busy.
TRIAL_INTERVAL = 32
#: A number that is this many times slower than the best is tried half as often.
SLOW = 1.5
#: A number that was quicker than the best, or has just ceased to be the best, is tried again after this many passes.
SOON = 4
#: The weight of the newest time in the mean of its size, and in the current slowness of its number of threads. The time
#: is capped at MAX_RATIO_TO_MEAN times the expected one, since something else may have held the pass up.
NEWEST, NEWEST_SLOWNESS, MAX_RATIO_TO_MEAN = 0.1, 0.25, 2.0
#: Of the first NUM_FIRST passes with a number of threads, the quickest counts. No pass is taken to be quicker than
#: MIN_PASS_S.
NUM_FIRST, MIN_PASS_S = 3, 1e-9
#: A pass reads the weights once, which takes about as long as this many additional rows.
ROWS_OF_WEIGHTS = 4


def available_threads() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ThreadChoice:
    """Chooses the number of threads of each pass, 1, 2, 4, … up to `most`, by the mean time of passes of that size.

    Means, not minima: a second thread that other work sometimes holds up is worth less. The current slowness of a
    number of threads is learnt from passes of all sizes, so that all sizes notice at once when the machine becomes
    busy. The choice does not change what a pass computes.
    """

    def __init__(self, most: int) -> None:
        self._numbers = [1 << power for power in range(max(most, 1).bit_length())]
        self._slowness = [1.0] * len(self._numbers)
        self._sizes: dict[int, _Size] = {}

    def choose(self, num_rows: int) -> int:
        """Return the number of threads for a pass of `num_rows` rows."""
        return self._numbers[self._size(num_rows).choose()]

    def best(self, num_rows: int) -> int:
        """Return the number that is currently the best."""
        return self._numbers[self._size(num_rows).best()]

    def observe(self, num_rows: int, num_threads: int, seconds: float) -> None:
        """Count a pass that took `seconds`."""
        row_s = max(seconds, MIN_PASS_S) / (num_rows + ROWS_OF_WEIGHTS)
        self._size(num_rows).observe(self._numbers.index(num_threads), row_s)

    def _size(self, num_rows: int) -> _Size:
        return self._sizes.setdefault(num_rows.bit_length(), _Size(self._slowness))


class _Size:
    """What is known of passes of about one number of rows, by index of the number of threads; times are per row.

    slowness: the current slowness of each number of threads, shared by all sizes and updated here.
    """

    def __init__(self, slowness: list[float]) -> None:
        self._slowness = slowness
        self._means_s = [0.0] * len(slowness)  # with the slowness divided out
        self._num_passes = [0] * len(slowness)
        self._waits = [0] * len(slowness)

    def best(self) -> int:
        """Return the place that is currently the quickest; 0 before the first pass."""
        known = [place for place, count in enumerate(self._num_passes) if count]
        return min(known, key=self._expected_s, default=0)

    def choose(self) -> int:
        """Return the best place or, now and then, a neighbour that has waited long enough."""
        best = self.best()
        due = [place for place in self._beside(best) if self._num_passes[best] and self._waits[place] < 0]
        return due[0] if due else best

    def observe(self, place: int, seconds: float) -> None:
        """Note the time of a pass, and when its place, or the one that was the best, is to be tried again."""
        before = self.best()
        before_s = self._expected_s(before)
        for other in self._beside(before):
            self._waits[other] -= other != place
        self._note(place, seconds)
        best = self.best()
        if self._num_passes[place] < NUM_FIRST:
            self._waits[place] = 1
        elif place != before:
            is_slow = self._expected_s(place) > SLOW * self._expected_s(best)
            self._waits[place] = SOON if seconds < before_s else TRIAL_INTERVAL * (2 if is_slow else 1)
        elif before != best:
            self._waits[before] = SOON

    def _note(self, place: int, seconds: float) -> None:
        """Update the means. The first passes include costs that are paid only once, so the quickest of them counts."""
        mean_s, own_s = self._means_s[place], seconds / self._slowness[place]
        if self._num_passes[place] < NUM_FIRST:
            self._means_s[place] = min(own_s, mean_s or own_s)
        else:
            seconds = min(seconds, MAX_RATIO_TO_MEAN * self._expected_s(place))
            self._means_s[place] += NEWEST * (seconds / self._slowness[place] - mean_s)
            self._slowness[place] += NEWEST_SLOWNESS * (seconds / mean_s - self._slowness[place])
        self._num_passes[place] += 1

    def _expected_s(self, place: int) -> float:
        return self._means_s[place] * self._slowness[place]

    def _beside(self, best: int) -> list[int]:
        return [place for place in (best - 1, best + 1) if 0 <= place < len(self._slowness)]
