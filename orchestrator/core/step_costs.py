"""What a target step costs, by the rows and KV tokens of its pass: measured at load, corrected by later steps.

The machine's speed is learnt quickly and separately from the shape of the costs, since a changing clock or other work
slows passes of all sizes alike. If each size were measured by itself, a size that happened to be measured in a slow
minute would be avoided from then on, and so never be measured again.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from orchestrator.core.cost_model import UNKNOWN, Batch, CostModel, CostModels, PassCosts, corrected, line_through
from orchestrator.core.types import PassLoad

#: Passes of similar size are averaged; each group ends at one of these numbers of rows.
GROUPS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096)
#: The first measurements of a mean weigh the same; a later one weighs at least this much against all before it.
MIN_WEIGHT = 0.05
#: Steps that ran together count as at most this many measurements.
MAX_AT_ONCE = 16
#: A measurement is capped at this multiple of its group's mean, since something else may have held up the step.
MAX_RATIO_TO_MEAN = 2.5
#: Cost models are recomputed once per REFRESH passes, and after every measurement until there have been that many.
REFRESH = 16
#: The rows of a pass are taken to cost at least this fraction of what is expected, whatever its contexts should cost.
MIN_SHARE_OF_ROWS = 0.1
#: No pass is taken to be quicker than this, since a measured time of 0 would have no ratio to others.
MIN_PASS_S = 1e-9
#: The weight of the newest pass in the machine's speed.
SPEED_WEIGHT = 0.05
#: How many measurements of each group a curve measured at load, and a line through all groups, are worth. A group's own
#: measurements lose half their worth in HALF_LIFE passes.
MEASURED_WORTH, LINE_WORTH = 20.0, 2.0
HALF_LIFE = 256
#: Passes remembered as entered: each request reports its passes within 64 of them, but not all requests at once.
MAX_ENTERED = 1024
#: Plain steps are measured again after PLAIN passes without such a measurement; after PLAIN_OF_CURVE if a curve was
#: measured at load.
PLAIN, PLAIN_OF_CURVE = 128, 1024


class Mean(NamedTuple):
    """The mean of the first values, then an exponential moving average in which a new value weighs MIN_WEIGHT."""

    value: float = 0.0
    num_values: int = 0

    def updated(self, value: float, times: int = 1) -> Mean:
        """Return the mean with one more value, counted `times` times."""
        weight = max(times / (self.num_values + times), 1.0 - (1.0 - MIN_WEIGHT) ** times)
        return Mean(self.value + weight * (value - self.value), self.num_values + times)


class Group(NamedTuple):
    """The steps of about one size.

    relative: the time of the rows, divided by the machine's speed. part_of_rows: the rows' share of the pass; the
    contexts took the rest, so a small share says little about the rows. measured_at: number of the last step's pass.
    """

    rows: Mean = Mean()
    relative: Mean = Mean()
    part_of_rows: Mean = Mean()
    measured_at: float = 0.0

    def updated(self, rows: float, relative: float, part_of_rows: float, number: float, num_steps: int) -> Group:
        """Return the group with num_steps more steps, all of these values."""
        if self.relative.num_values:
            relative = min(relative, MAX_RATIO_TO_MEAN * self.relative.value)
        means = self.rows.updated(rows, num_steps), self.relative.updated(relative, num_steps)
        return Group(*means, self.part_of_rows.updated(part_of_rows, num_steps), number)

    def weight(self, now: float) -> float:
        """Return how many fresh measurements without contexts the group is worth at pass `now`."""
        num_values = self.part_of_rows.value * min(self.relative.num_values, 1 / MIN_WEIGHT)
        return float(num_values * 0.5 ** ((now - self.measured_at) / HALF_LIFE))


class StepCosts:
    """Seconds of a step by the rows and KV tokens of its pass; shared by all requests of a process.

    clock: returns seconds, monotonic. Only ratios of costs are used, so a common factor does not matter.
    measured: what the engine's passes cost when it was loaded; if None, costs are assumed to be roughly linear.
    Attribute drafts_in_bursts: native code drafts in bursts, whose steps are measured by their passes alone.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, measured: PassCosts | None = None) -> None:
        self.clock, self._measured = clock, measured
        self._now = measured or UNKNOWN
        self._speed = 1.0 if measured else 0.0  # seconds of a pass that costs 1 by the curve
        self._groups: dict[int, Group] = {}
        self._rows = self._tokens = self._others = Mean()  # of one request; number of other requests in a pass
        self._kv_tokens = Mean()  # of all contexts of a pass
        self._plain, self._plain_in_pass = Mean(), 0  # seconds of plain steps run together; requests in their pass
        self._single = Mean()  # extra seconds of a plain step run alone, not with others
        self._last_single_s = 0.0
        # Measured passes: a request's step counts as its share of one, and so does a rest, however many steps it has.
        self._num_passes = self._plain_at = 0.0
        self._entered: dict[int, PassLoad] = {}  # the newest passes of native code, by the identity of their loads
        self.drafts_in_bursts = False
        self._models = self._computed()
        self._computed_at = 0.0
        self._lock = threading.Lock()

    def observe(
        self, num_rows: int, num_in_pass: int, num_tokens: int, seconds: float, load: PassLoad | None = None
    ) -> None:
        """Learn from one request's step.

        num_rows, num_tokens: this request's. num_in_pass: the requests that shared the pass. seconds: of the step.
        load: of the pass; if None, the other requests of the pass are assumed to be of recent average size.
        """
        with self._lock:
            is_comparable = num_in_pass == self._plain_in_pass and not (
                load and (load.is_atypical or load.num_in_separate_pass)
            )
            if num_rows == 1 and self._plain_at and is_comparable:
                # The quicker of two steps in a row, since something else may have held one up.
                quicker_s = min(seconds, self._last_single_s or self._plain.value)
                self._single, self._last_single_s = self._single.updated(quicker_s - self._plain.value), seconds
            self._enter(num_rows, num_in_pass, num_tokens, seconds, load, 1.0 / num_in_pass)

    def observe_plain(self, num_in_pass: int, seconds: float, load: PassLoad | None = None, num_steps: int = 1) -> None:
        """Learn from plain steps that ran together, which may be quicker than single ones. seconds: of one."""
        with self._lock:
            num_steps = min(num_steps, MAX_AT_ONCE)
            self._enter(1, num_in_pass, 1, seconds + self._single_s, load, 1.0 / num_in_pass, num_steps)
            self._note_plain(load.num_steps if load else num_in_pass, seconds)

    def observe_load(self, num_in_pass: int) -> None:
        """Note how many requests shared a pass whose cost is not learnt."""
        with self._lock:
            self._others = self._others.updated(num_in_pass - 1)

    def postpone_plain(self) -> None:
        """Put off the next measurement of plain steps as if one had just been taken: their last time is unusable."""
        with self._lock:
            self._plain_at = self._num_passes

    def observe_native(
        self, num_rows: int, num_in_pass: int, num_tokens: int, seconds: float, load: PassLoad | None
    ) -> None:
        """Learn from one step of a burst in which native code drafts; arguments as for `observe`.

        Its time is that of its pass, which is entered only once, for the first of its requests to report it. load: the
        same object for all of these requests.
        """
        with self._lock:
            self.drafts_in_bursts = True
            if load and not self._is_new(load):
                return
            self._enter(num_rows, num_in_pass, num_tokens, seconds, load, 1.0 if load else 1.0 / num_in_pass)
            is_plain = load.num_rows == load.num_steps if load else num_rows == 1
            if is_plain:
                self._single = self._single.updated(0.0)  # looking for a draft between such steps costs next to nothing
                self._note_plain(load.num_steps if load else num_in_pass, seconds)

    def _is_new(self, load: PassLoad) -> bool:
        """Return whether a pass has not been entered yet; keep its load, so that no other object can have its id."""
        if id(load) in self._entered:
            return False
        self._entered[id(load)] = load
        if len(self._entered) > MAX_ENTERED:
            del self._entered[next(iter(self._entered))]
        return True

    def _note_plain(self, num_in_pass: int, seconds: float) -> None:
        if num_in_pass != self._plain_in_pass:
            self._plain, self._plain_in_pass, self._last_single_s = Mean(), num_in_pass, 0.0
        self._plain, self._plain_at = self._plain.updated(seconds), self._num_passes

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
        """Enter the cost of equal steps. part: the share of a pass that they count as. Caller holds the lock."""
        # Otherwise most of them ran in another pass.
        shows_others = not load or load.num_in_separate_pass < load.num_steps
        if shows_others:
            self._rows = self._rows.updated(load.mean_rows if load else num_rows, num_steps)
            self._tokens = self._tokens.updated(load.mean_tokens if load else num_tokens, num_steps)
            num_requests = load.num_steps + load.num_in_separate_pass if load else num_in_pass
            self._others = self._others.updated(num_requests - 1, num_steps)
        all_rows = load.num_rows if load else num_rows + (num_in_pass - 1) * self._rows.value
        group, seconds, kv_s = bisect_left(GROUPS, all_rows), max(seconds, MIN_PASS_S), 0.0
        if load:
            kv_s = self._now.kv_s(load.num_kv_tokens, load.num_row_kv_tokens)
            if shows_others:
                self._kv_tokens = self._kv_tokens.updated(load.num_kv_tokens, num_steps)
        self._num_passes += part
        rows_s = float(self._now.curve.at(np.array(all_rows)))
        self._note_speed(seconds / (rows_s + kv_s))
        relative, part_of_rows = max(seconds / self._speed - kv_s, MIN_SHARE_OF_ROWS * rows_s), rows_s / (rows_s + kv_s)
        known = self._groups.get(group, Group())
        self._groups[group] = known.updated(all_rows, relative, part_of_rows, self._num_passes, num_steps)
        if self._num_passes < REFRESH or self._num_passes - self._computed_at >= REFRESH:
            self._models, self._computed_at = self._computed(), self._num_passes

    def _note_speed(self, ratio: float) -> None:
        """Note the time of a pass, divided by the expected cost of its rows and its contexts."""
        if self._speed:
            self._speed += SPEED_WEIGHT * (min(ratio, MAX_RATIO_TO_MEAN * self._speed) - self._speed)
        else:
            self._speed = ratio

    @property
    def num_in_pass(self) -> int:
        """How many requests have recently shared a pass, on average."""
        return 1 + round(self._others.value)

    @property
    def shares_passes(self) -> bool:
        """True if requests have recently shared their passes with others."""
        return self.num_in_pass > 1

    @property
    def breaks_others(self) -> bool:
        """True if a step that needs Python ends the bursts of the requests that share its passes."""
        return self.drafts_in_bursts and self.shares_passes

    @property
    def wants_plain(self) -> bool:
        """True if plain steps should be measured: without their cost it is unknown what drafts gain."""
        if self._measured:
            return self._num_passes - self._plain_at >= PLAIN_OF_CURVE
        return not self._plain_at or self._num_passes - self._plain_at >= PLAIN

    def cost_model(self, num_kv_tokens: int = 0) -> CostModel | None:
        """Return the costs for 1…MAX_NODES + 1 rows; None before passes or plain steps have been measured.

        num_kv_tokens: tokens of the request's context.
        """
        return self._models.at(num_kv_tokens) if self._measured or self._plain_at else None

    def _computed(self) -> CostModels:
        """Return the cost models that follow from the measurements so far, and keep their curve."""
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
        return CostModels(self._now.times(self._speed), batch, self._single_s)
