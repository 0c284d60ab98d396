"""When a pass begins: the engine waits a moment for sequences that it has just answered, as long as that pays.

The requests that one pass has answered come back a moment later. Without the wait the others would already be running
by then, and the load would settle into alternating groups (docs/architecture.md, The engine).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.engine.kv.sequences import IDLE_S

IDLE_POLL_S = 0.5
SMOOTHING = 0.3


@dataclass
class LiveSequence:
    """return_s: smoothed time from an answer to the next call. answered_s: None while a call is pending."""

    return_s: float
    answered_s: float | None = None


@dataclass
class BatchingPolicy:
    """Decides how long to delay a pass, from the cost of a pass and the time that sequences take to call again.

    patience: the longest wait, as a multiple of the cost of a pass. Most of that cost is overhead, so saving one pass
    pays for many such waits. pass_s: smoothed cost of a pass. return_s: smoothed over all sequences, and the initial
    estimate for a new one.
    """

    patience: float = 0.5
    pass_s: float = 0.0
    return_s: float = 0.001
    _live: dict[int, LiveSequence] = field(default_factory=dict)
    _pass_ended_s: float = 0.0

    def arrived(self, sequence_id: int, now_s: float) -> None:
        """Note a call. now_s: when it was submitted, possibly long before the engine receives it."""
        live = self._live.setdefault(sequence_id, LiveSequence(self.return_s))
        if live.answered_s is not None:
            live.return_s += SMOOTHING * (now_s - live.answered_s - live.return_s)
            self.return_s += SMOOTHING * (live.return_s - self.return_s)
            live.answered_s = None

    def answered(self, sequence_ids: list[int], now_s: float, pass_s: float) -> None:
        """Note the end of a pass, its cost, and the sequences that it answered."""
        self.pass_s += SMOOTHING * (pass_s - self.pass_s)
        self._pass_ended_s = now_s
        for sequence_id in sequence_ids:
            if sequence_id in self._live:
                self._live[sequence_id].answered_s = now_s

    def left(self, sequence_id: int) -> None:
        """Note that a sequence has ended."""
        self._live.pop(sequence_id, None)

    def forget_idle(self, now_s: float) -> None:
        """Stop expecting sequences that have not called within IDLE_S of their answer."""
        for sequence_id, live in list(self._live.items()):
            if live.answered_s is not None and now_s - live.answered_s > IDLE_S:
                del self._live[sequence_id]

    def wait_s(self, now_s: float, oldest_call_s: float | None) -> float:
        """Return how long to wait for another call; 0 = begin the pass.

        oldest_call_s: when the oldest waiting call arrived; None = no call is waiting.
        Invariant: a lone sequence never waits; no call waits longer than patience · pass_s for a pass to begin.
        """
        if oldest_call_s is None:
            return IDLE_POLL_S
        limit_s = max(oldest_call_s, self._pass_ended_s) + self.patience * self.pass_s
        # A sequence may take up to twice its usual time.
        due_s = [live.answered_s + 2.0 * live.return_s for live in self._live.values() if live.answered_s is not None]
        return max((due - now_s for due in due_s if now_s < due <= limit_s), default=0.0)
