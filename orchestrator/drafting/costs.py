"""What a draft is worth: the price of a row in the next pass, from the costs measured at load and one speed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from orchestrator.core.arrays import FloatArray
from orchestrator.core.costs import UNKNOWN, PassCosts
from orchestrator.core.proposal import Step
from orchestrator.core.tree import MAX_NODES
from orchestrator.core.types import Acceptance

#: The weight of a new value in a smoothed one.
WEIGHT = 0.05
#: A pass counts as at most this many times as slow as expected, since other work may have held it up.
MAX_RATIO = 2.5


class RowCosts(NamedTuple):
    """What one request's rows cost in the next pass, beside those of the other requests.

    seconds: (N,) float64, non-decreasing; index n: time of the pass if the request has n draft nodes.
    others_tokens: the tokens that the other requests are expected to get from the pass.
    rate_to_beat: tokens of the batch per second without a draft of this request, or without any draft if that is more;
    otherwise requests that all draft under load would each find their own draft worthwhile.
    """

    seconds: FloatArray
    others_tokens: float
    rate_to_beat: float


class StepCosts:
    """The costs of the target's passes, and what recent passes held; shared by all requests of a process.

    The machine's speed is smoothed over all passes alike: a changing clock, or other work, slows passes of all sizes.
    measured: what passes cost when the engine was loaded; if None, additional rows are taken to cost little.
    num_sequences: sequences that shared the last pass of steps.
    """

    def __init__(self, measured: PassCosts | None = None) -> None:
        self._costs = measured or UNKNOWN
        self._speed = 1.0 if measured else 0.0  # the time of a pass, divided by its cost at load
        self.num_sequences = 1
        # Means of recent passes: other sequences, a sequence's rows and tokens, tokens of all contexts.
        self._others, self._rows, self._tokens, self._kv_tokens = 0.0, 1.0, 1.0, 0.0
        self._lock = threading.Lock()

    def observe(self, steps: Sequence[Step]) -> None:
        """Learn from the steps of a request; any thread may call."""
        with self._lock:
            for step in steps:
                if not step.acceptance.is_atypical:
                    self._note(step.proposal.tree.num_nodes + 1, step.acceptance)

    def of(self, context_len: int) -> RowCosts:
        """Return what the rows of a request cost in the next pass. context_len: tokens of its context."""
        with self._lock:
            speed, others, rows, tokens = self._speed or 1.0, self._others, self._rows, self._tokens
            others_kv = min(others, 1.0) * max(self._kv_tokens - context_len, 0.0)
        costs, own = self._costs, np.arange(1.0, MAX_NODES + 2)
        contexts_s = costs.kv_s(others_kv + context_len, rows * others_kv)
        seconds = speed * (costs.at(own + others * rows) + contexts_s + costs.kv_s(0.0, 1.0) * context_len * own)
        plain_s = speed * (
            float(costs.at(np.array(1.0 + others))) + costs.kv_s(others_kv + context_len, others_kv + context_len)
        )
        rate_to_beat = max((1.0 + others) / plain_s, (1.0 + others * tokens) / float(seconds[0]))
        return RowCosts(seconds, others * tokens, rate_to_beat)

    def _note(self, num_rows: int, acceptance: Acceptance) -> None:
        load = acceptance.load
        self.num_sequences = acceptance.num_in_pass
        self._others = _smoothed(self._others, acceptance.num_in_pass - 1)
        self._rows = _smoothed(self._rows, load.mean_rows if load else num_rows)
        self._tokens = _smoothed(self._tokens, load.mean_tokens if load else acceptance.num_tokens)
        if not load:
            return
        self._kv_tokens = _smoothed(self._kv_tokens, load.num_kv_tokens)
        expected_s = float(self._costs.at(np.array(float(load.num_rows))))
        expected_s += self._costs.kv_s(load.num_kv_tokens, load.num_row_kv_tokens)
        ratio = 1e-6 * (acceptance.forward_us + acceptance.verify_us) / expected_s
        self._speed = _smoothed(self._speed, min(ratio, MAX_RATIO * self._speed)) if self._speed else ratio


def _smoothed(mean: float, value: float) -> float:
    return mean + WEIGHT * (value - mean)
