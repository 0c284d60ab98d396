"""Keeps drafts from making a request slower than plain decoding."""

from __future__ import annotations

#: The part of a request's time that drafts may lose against plain decoding before they pause.
LOSS = 0.01
#: Plain steps that may be lost before the first pause; so many gained make the next pause a first one again.
GRACE_STEPS = 4
#: Most plain steps of gain that are set off against later losses.
CREDIT_STEPS = 256
#: Steps of the first pause; each further one is twice as long.
FIRST_PAUSE = 32
LONGEST_PAUSE = 1024


class Ledger:
    """Keeps what drafts lose against plain decoding within LOSS of a request's time.

    Source: the on/off test of Cascade (arXiv:2506.20675), here on one balance with growing pauses instead of phases.
    """

    def __init__(self) -> None:
        self._balance_s = 0.0
        self._elapsed_s = 0.0
        self._pause = 0
        self._next_pause = FIRST_PAUSE

    @property
    def is_pausing(self) -> bool:
        """True while drafts pause."""
        return self._pause > 0

    def observe(self, num_tokens: int, step_s: float, plain_s: float) -> None:
        """Enter a step that took step_s, drafting included. plain_s: what a plain step would have taken."""
        self._pause = max(self._pause - 1, 0)
        self._balance_s = min(self._balance_s + num_tokens * plain_s - step_s, CREDIT_STEPS * plain_s)
        self._elapsed_s += step_s
        if self._balance_s > GRACE_STEPS * plain_s:
            self._next_pause = FIRST_PAUSE
        elif self._balance_s < -LOSS * self._elapsed_s - GRACE_STEPS * plain_s:
            self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, LONGEST_PAUSE)
            self._balance_s = 0.0
