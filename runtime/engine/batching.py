"""When a pass may begin: waits for the sequences that were just answered, as long as their company pays.

The requests that one pass has answered come back a moment later, when the others would already be
running, and the load would settle into alternating groups (docs/architecture.md, Batching).
"""

from __future__ import annotations

from dataclasses import dataclass, field

IDLE_POLL_S = 0.5
SMOOTHING = 0.3


@dataclass
class Live:
    """A sequence between two calls. return_s: how long it usually stays away; answered_s None = its call is here."""

    return_s: float
    answered_s: float | None = None


@dataclass
class BatchingPolicy:
    """Estimates of the cost of a pass and of the time a sequence stays away, and the wait that follows from them.

    pass_s: smoothed cost of a pass. patience: most of it that a pass is held back for company; a pass
    costs mostly its overhead, so one that is saved pays for many such waits.
    """

    patience: float = 0.5
    pass_s: float = 0.0
    return_s: float = 0.001
    _live: dict[int, Live] = field(default_factory=dict)
    _held_since_s: float | None = None

    def arrived(self, sequence_id: int, now_s: float) -> None:
        """Note a call, which may have waited for a pass to end; now_s: when it came."""
        live = self._live.setdefault(sequence_id, Live(self.return_s))
        if live.answered_s is not None:
            live.return_s += SMOOTHING * (now_s - live.answered_s - live.return_s)
            self.return_s += SMOOTHING * (live.return_s - self.return_s)
            live.answered_s = None

    def answered(self, sequence_ids: list[int], now_s: float, pass_s: float) -> None:
        """Note the end of a pass and whom it answered."""
        self.pass_s += SMOOTHING * (pass_s - self.pass_s)
        self._held_since_s = None
        for sequence_id in sequence_ids:
            if sequence_id in self._live:
                self._live[sequence_id].answered_s = now_s

    def left(self, sequence_id: int) -> None:
        """Note that a sequence has ended."""
        self._live.pop(sequence_id, None)

    def forget_idle(self, now_s: float, idle_s: float = 2.0) -> None:
        """Note that sequences that were silent for `idle_s` are not expected any more."""
        for sequence_id, live in list(self._live.items()):
            if live.answered_s is not None and now_s - live.answered_s > idle_s:
                del self._live[sequence_id]

    def wait_s(self, now_s: float, has_jobs: bool) -> float:
        """Return how long to wait for the next call: 0 = begin the pass.

        Invariant: without jobs it waits; a lone sequence never waits; no wait outlasts patience · pass_s.
        """
        if not has_jobs:
            return IDLE_POLL_S
        if self._held_since_s is None:
            self._held_since_s = now_s
        limit_s = self._held_since_s + self.patience * self.pass_s
        due_s = [self._due_s(live) for live in self._live.values() if live.answered_s is not None]
        worth = [due for due in due_s if now_s < due <= limit_s]
        return max(worth) - now_s if worth else 0.0

    @staticmethod
    def _due_s(live: Live) -> float:
        """Return when a sequence is back, with as much again for bad luck."""
        assert live.answered_s is not None
        return live.answered_s + 2.0 * live.return_s
