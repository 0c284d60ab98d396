"""Keeps drafts from making a request slower than plain decoding."""

from __future__ import annotations

from orchestrator.core.step_costs import StepCosts, Surface
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance

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


class Meter:
    """Measures the steps of one request: for the costs of all requests, and for its own ledger.

    is_first: until the first step, whose pass holds the prompt and whose proposal reads it, is answered.
    draft_s: time of the last proposal.
    """

    def __init__(self, costs: StepCosts) -> None:
        self.is_first = True
        self.draft_s = 0.0
        self._costs, self._ledger = costs, Ledger()
        self._began_s = self._sent_s = 0.0

    def begin(self) -> Surface | None:
        """Note that a proposal begins; return what rows cost, None if the step should be a plain one."""
        self._began_s = self._costs.clock()
        return self.surface()

    def surface(self) -> Surface | None:
        """Return what rows cost, None if the next step should be a plain one."""
        return None if self._ledger.is_pausing else self._costs.surface()

    def sent(self) -> None:
        """Note that the proposal is made."""
        self._sent_s = self._costs.clock()
        self.draft_s = self._sent_s - self._began_s

    def answered(self, tree: TokenTree, acceptance: Acceptance) -> None:
        """Note the answer to a step. The time that it waited for passes of other requests is not its cost."""
        if self.is_first:
            self.is_first = False
            return
        num_rows, step_s = tree.num_nodes + 1, self._costs.clock() - self._sent_s - 1e-6 * acceptance.queue_us
        self._costs.observe(num_rows, acceptance.num_in_pass, acceptance.num_tokens, step_s)
        if surface := self._costs.surface():
            step_s = float(surface.seconds[num_rows - 1]) + self.draft_s
            self._ledger.observe(acceptance.num_tokens, step_s, float(surface.seconds[0]))
