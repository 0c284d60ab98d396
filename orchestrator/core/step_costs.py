"""What a step of the target costs by the rows and KV tokens of its pass: as measured at load, and by the steps since.

The machine's speed is learnt apart from the shape of the costs, and quickly: a clock that changes, or other work, makes
passes of all sizes slower alike. Were each size measured by itself, one that happened to be measured in slow minutes
would be avoided from then on, and so never be measured again.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from orchestrator.core.surfaces import UNKNOWN, Batch, PassCosts, Surface, Surfaces, corrected, line_through
from orchestrator.core.types import PassLoad

#: Passes of similar size are averaged; each group ends at one of these numbers of rows.
GROUPS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096)
#: A measurement weighs as much as each of a group's first ones, and at last this much against all earlier ones.
LEAST_WEIGHT = 0.05
#: Steps that were made together count as at most so many measurements.
MOST_AT_ONCE = 16
#: A measurement counts for at most this many times its group's mean: a step may have been held up by something else.
MOST_OF_MEAN = 2.5
#: A surface is computed anew after so many passes; one of fewer passes at once.
REFRESH = 16
#: The rows of a pass have cost at least this part of what they should, however much of it its contexts should have.
LEAST_OF_ROWS = 0.1
#: No pass is taken to be quicker: what a clock cannot tell from nothing has no ratio to anything.
LEAST_S = 1e-9
#: The weight of the newest pass in the machine's speed.
SPEED_WEIGHT = 0.05
#: A curve that was measured at load, and a line through all groups, are worth so many measurements of each group; those
#: of a group are worth half after so many passes.
MEASURED_WORTH, LINE_WORTH = 20.0, 2.0
HALF_LIFE = 256
#: Passes that requests may still tell of: each is answered after 64 of them at the latest, but not all at once.
MOST_ENTERED = 1024
#: Passes are taken to be shared if they held this many other requests on average.
SHARED = 0.5
#: After so many passes without a measured plain step, plain steps are measured again; where a curve has been measured,
#: after more.
PLAIN, PLAIN_OF_CURVE = 128, 1024


class Mean(NamedTuple):
    """A mean whose old values fade."""

    value: float = 0.0
    num_values: int = 0

    def of(self, value: float, times: int = 1) -> Mean:
        """Return the mean with one more value, which counts as so many."""
        weight = max(times / (self.num_values + times), 1.0 - (1.0 - LEAST_WEIGHT) ** times)
        return Mean(self.value + weight * (value - self.value), self.num_values + times)


class Group(NamedTuple):
    """The steps of about one size.

    relative: what the rows took, by the machine's speed. part_of_rows: of the pass; the contexts took the rest, so the
    less it is, the less is known of the rows. measured_at: number of the last step's pass.
    """

    rows: Mean = Mean()
    relative: Mean = Mean()
    part_of_rows: Mean = Mean()
    measured_at: float = 0.0

    def of(self, rows: float, relative: float, part_of_rows: float, number: float, num_steps: int) -> Group:
        """Return the group with further steps that were alike."""
        if self.relative.num_values:
            relative = min(relative, MOST_OF_MEAN * self.relative.value)
        means = self.rows.of(rows, num_steps), self.relative.of(relative, num_steps)
        return Group(*means, self.part_of_rows.of(part_of_rows, num_steps), number)

    def weight(self, now: float) -> float:
        """Return how many fresh measurements of rows alone the group is worth at pass `now`."""
        num_values = self.part_of_rows.value * min(self.relative.num_values, 1 / LEAST_WEIGHT)
        return float(num_values * 0.5 ** ((now - self.measured_at) / HALF_LIFE))


class StepCosts:
    """Seconds of a step by the rows and KV tokens of its pass; shared by all requests of a process.

    clock: seconds, monotonic. Only ratios of costs are used, so that a factor common to all of them does not matter.
    measured: what passes of the engine cost when it was loaded; without it they are taken to lie near a line.
    Attribute makes_drafted: the engine makes several steps together, with drafts, which are measured by their passes
    alone.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, measured: PassCosts | None = None) -> None:
        self.clock, self._measured = clock, measured
        self._now = measured or UNKNOWN
        self._speed = 1.0 if measured else 0.0  # seconds of what costs 1 by the curve
        self._groups: dict[int, Group] = {}
        self._rows = self._tokens = self._others = Mean()  # of one request; other requests in a pass
        self._kv_tokens = Mean()  # of all contexts of a pass
        self._plain, self._plain_in_pass = Mean(), 0  # of plain steps made together with so many requests in a pass
        self._single = Mean()  # what a plain step takes alone beyond one of several that are made together
        self._last_single_s = 0.0
        # Passes that were measured: a request's step is its part of one, and so is a rest, however many steps it has.
        self._num_passes = self._plain_at = 0.0
        self._entered: dict[int, PassLoad] = {}  # the newest passes of native code, by the identity of their loads
        self.makes_drafted = False
        self._surfaces = self._computed()
        self._computed_at = 0.0
        self._lock = threading.Lock()

    def observe(
        self, num_rows: int, num_in_pass: int, num_tokens: int, seconds: float, load: PassLoad | None = None
    ) -> None:
        """Learn from one request's step.

        num_rows, num_tokens: this request's. num_in_pass: the requests that shared the pass. seconds: of the step.
        load: of the pass; where it is not known, the other requests are taken to be as others were.
        """
        with self._lock:
            is_comparable = num_in_pass == self._plain_in_pass and not (load and (load.has_prompts or load.num_beside))
            if num_rows == 1 and self._plain_at and is_comparable:
                # The quicker one of two in a row, since something else may have held one up.
                quicker_s = min(seconds, self._last_single_s or self._plain.value)
                self._single, self._last_single_s = self._single.of(quicker_s - self._plain.value), seconds
            self._enter(num_rows, num_in_pass, num_tokens, seconds, load, 1.0 / num_in_pass)

    def observe_plain(self, num_in_pass: int, seconds: float, load: PassLoad | None = None, num_steps: int = 1) -> None:
        """Learn from plain steps that were made together, which may be quicker than single ones. seconds: of one."""
        with self._lock:
            num_steps = min(num_steps, MOST_AT_ONCE)
            self._enter(1, num_in_pass, 1, seconds + self._single_s, load, 1.0 / num_in_pass, num_steps)
            self._note_plain(load.num_steps if load else num_in_pass, seconds)

    def observe_load(self, num_in_pass: int) -> None:
        """Note how many requests shared a pass of whose cost nothing is learnt."""
        with self._lock:
            self._others = self._others.of(num_in_pass - 1)

    def postpone_plain(self) -> None:
        """Put the next measurement of plain steps off, as after one: the time of the last ones says nothing."""
        with self._lock:
            self._plain_at = self._num_passes

    def observe_made(
        self, num_rows: int, num_in_pass: int, num_tokens: int, seconds: float, load: PassLoad | None
    ) -> None:
        """Learn from a step of several that native code made together, some with drafts; as `observe`.

        Its time is that of its pass, which is the same for all its requests and entered once, whoever of them comes
        first. load: the same object for all of them.
        """
        with self._lock:
            self.makes_drafted = True
            if load and not self._is_new(load):
                return
            self._enter(num_rows, num_in_pass, num_tokens, seconds, load, 1.0 if load else 1.0 / num_in_pass)
            is_plain = load.num_rows == load.num_steps if load else num_rows == 1
            if is_plain:
                self._single = self._single.of(0.0)  # a look between such steps costs next to nothing
                self._note_plain(load.num_steps if load else num_in_pass, seconds)

    def _is_new(self, load: PassLoad) -> bool:
        """Return whether a pass has not been entered yet, and remember it; kept, its identity is no other one's."""
        if id(load) in self._entered:
            return False
        self._entered[id(load)] = load
        if len(self._entered) > MOST_ENTERED:
            del self._entered[next(iter(self._entered))]
        return True

    def _note_plain(self, num_in_pass: int, seconds: float) -> None:
        if num_in_pass != self._plain_in_pass:
            self._plain, self._plain_in_pass, self._last_single_s = Mean(), num_in_pass, 0.0
        self._plain, self._plain_at = self._plain.of(seconds), self._num_passes

    @property
    def _single_s(self) -> float:
        return max(self._single.value, 0.0)

    def _enter(
        self,
        num_rows: int,
        num_in_pass: int,
        num_tokens: int,
        seconds: float,
        load: PassLoad | None,
        part: float,
        num_steps: int = 1,
    ) -> None:
        """Enter what a request's step cost, or each of several alike; part: of the pass. The caller holds the lock."""
        shows_others = not load or load.num_beside < load.num_steps  # otherwise most of them have had another pass
        if shows_others:
            self._rows = self._rows.of(load.mean_rows if load else num_rows, num_steps)
            self._tokens = self._tokens.of(load.mean_tokens if load else num_tokens, num_steps)
            num_requests = load.num_steps + load.num_beside if load else num_in_pass
            self._others = self._others.of(num_requests - 1, num_steps)
        all_rows = load.num_rows if load else num_rows + (num_in_pass - 1) * self._rows.value
        group, seconds, kv_s = bisect_left(GROUPS, all_rows), max(seconds, LEAST_S), 0.0
        if load:
            kv_s = self._now.kv_s(load.num_kv_tokens, load.num_row_kv_tokens)
            if shows_others:
                self._kv_tokens = self._kv_tokens.of(load.num_kv_tokens, num_steps)
        self._num_passes += part
        rows_s = float(self._now.curve.at(np.array(all_rows)))
        self._note_speed(seconds / (rows_s + kv_s))
        relative, part_of_rows = max(seconds / self._speed - kv_s, LEAST_OF_ROWS * rows_s), rows_s / (rows_s + kv_s)
        known = self._groups.get(group, Group())
        self._groups[group] = known.of(all_rows, relative, part_of_rows, self._num_passes, num_steps)
        if self._num_passes < REFRESH or self._num_passes - self._computed_at >= REFRESH:
            self._surfaces, self._computed_at = self._computed(), self._num_passes

    def _note_speed(self, slower: float) -> None:
        """Note how many times longer a pass took than its rows and its contexts should have."""
        if self._speed:
            self._speed += SPEED_WEIGHT * (min(slower, MOST_OF_MEAN * self._speed) - self._speed)
        else:
            self._speed = slower

    @property
    def shares_passes(self) -> bool:
        """True if requests have had others in their passes lately."""
        return self._others.value > SHARED

    @property
    def breaks_others(self) -> bool:
        """True if other requests, whose steps the engine makes without Python, wait for a step that needs it."""
        return self.makes_drafted and self.shares_passes

    @property
    def wants_plain(self) -> bool:
        """True if plain steps should be measured: without their cost nobody knows what drafts gain."""
        if self._measured:
            return self._num_passes - self._plain_at >= PLAIN_OF_CURVE
        return not self._plain_at or self._num_passes - self._plain_at >= PLAIN

    def surface(self, num_kv_tokens: int = 0) -> Surface | None:
        """Return the costs for 1…MAX_NODES + 1 rows; None before passes or plain steps have been measured.

        num_kv_tokens: of the request's context.
        """
        return self._surfaces.at(num_kv_tokens) if self._measured or self._plain_at else None

    def _computed(self) -> Surfaces:
        """Return the surfaces by the measurements so far, and keep their curve."""
        if self._groups:
            groups = sorted(self._groups.values(), key=lambda group: group.rows.value)
            sizes, relative = (
                np.array([mean.value for mean in means]) for means in zip(*(each[:2] for each in groups), strict=True)
            )
            weights = np.array([group.weight(self._num_passes) for group in groups])
            base = self._measured.curve if self._measured else line_through(sizes, relative, weights)
            worth = MEASURED_WORTH if self._measured else LINE_WORTH
            self._now = self._now._replace(curve=corrected(base, sizes, relative, weights, worth))
        batch = Batch(self._others.value, self._rows.value, self._tokens.value, self._kv_tokens.value)
        return Surfaces(self._now.times(self._speed), batch, self._single_s)
