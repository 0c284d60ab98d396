"""How many threads a pass takes: learnt from the passes themselves, since it depends on what else the machine does."""

from __future__ import annotations

import os

#: After so many passes of a size, a number beside the best is tried again: the machine may have become idle or busy.
TRIAL_INTERVAL = 32
#: A trial that is this many times slower than the best is repeated half as often.
SLOW = 1.5
#: A number that was quicker than the best, or has just ceased to be the best, is tried again so soon.
SOON = 4
#: The part of the newest time in the average of its size, and in how slow its number of threads is at present. It
#: counts at most so many times what it should have been: something else may have held the pass up.
NEWEST, NEWEST_SLOWNESS, MOST_OF_MEAN = 0.1, 0.25, 2.0
#: Of so many first passes with a number of threads the quickest counts. No pass is taken to be quicker than LEAST_S.
NUM_FIRST, LEAST_S = 3, 1e-9
#: A pass reads the weights once, which takes about as long as so many further rows.
ROWS_OF_WEIGHTS = 4


def available_threads() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ThreadChoice:
    """Chooses the number of threads of each pass, 1, 2, 4, … up to `most`, by the average time of passes of that size.

    Averages, not minima: a second thread that is at times held up by other work is worth less. How slow a number of
    threads is at present is learnt from passes of all sizes, so that each notices at once when the machine becomes
    busy. Nothing that a pass computes depends on the choice.
    """

    def __init__(self, most: int) -> None:
        self._numbers = [1 << power for power in range(max(most, 1).bit_length())]
        self._slowness = [1.0] * len(self._numbers)
        self._sizes: dict[int, _Size] = {}

    def choose(self, num_rows: int) -> int:
        """Return the number of threads for a pass of `num_rows` rows."""
        return self._numbers[self._size(num_rows).choose()]

    def best(self, num_rows: int) -> int:
        """Return the number that is the best at present."""
        return self._numbers[self._size(num_rows).best()]

    def observe(self, num_rows: int, num_threads: int, seconds: float) -> None:
        """Count a pass that took `seconds`."""
        row_s = max(seconds, LEAST_S) / (num_rows + ROWS_OF_WEIGHTS)
        self._size(num_rows).observe(self._numbers.index(num_threads), row_s)

    def _size(self, num_rows: int) -> _Size:
        return self._sizes.setdefault(num_rows.bit_length(), _Size(self._slowness))


class _Size:
    """What is known of passes of about one number of rows, by place in the numbers of threads; times are of a row.

    slowness: of each place at present, shared by all sizes and updated here.
    """

    def __init__(self, slowness: list[float]) -> None:
        self._slowness = slowness
        self._means_s = [0.0] * len(slowness)  # apart from the slowness
        self._num_passes = [0] * len(slowness)
        self._waits = [0] * len(slowness)

    def best(self) -> int:
        """Return the place that is the quickest at present; before the first pass, 0."""
        known = [place for place, count in enumerate(self._num_passes) if count]
        return min(known, key=self._expected_s, default=0)

    def choose(self) -> int:
        """Return the best place or, now and then, one beside it that has waited long enough."""
        best = self.best()
        due = [place for place in self._beside(best) if self._num_passes[best] and self._waits[place] < 0]
        return due[0] if due else best

    def observe(self, place: int, seconds: float) -> None:
        """Note what a pass took, and when the place, or the one that was the best, is to be tried again."""
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
        """Update the averages. The first passes hold what is paid once: of them the quickest counts."""
        mean_s, own_s = self._means_s[place], seconds / self._slowness[place]
        if self._num_passes[place] < NUM_FIRST:
            self._means_s[place] = min(own_s, mean_s or own_s)
        else:
            seconds = min(seconds, MOST_OF_MEAN * self._expected_s(place))
            self._means_s[place] += NEWEST * (seconds / self._slowness[place] - mean_s)
            self._slowness[place] += NEWEST_SLOWNESS * (seconds / mean_s - self._slowness[place])
        self._num_passes[place] += 1

    def _expected_s(self, place: int) -> float:
        return self._means_s[place] * self._slowness[place]

    def _beside(self, best: int) -> list[int]:
        return [place for place in (best - 1, best + 1) if 0 <= place < len(self._slowness)]
