"""Keeps drafts from making a request slower than plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from orchestrator.core.cost_model import CostModel
from orchestrator.core.proposal import Proposal, Step
from orchestrator.core.step_costs import StepCosts
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance

#: The fraction of a request's time that drafts may lose against plain decoding before they pause.
LOSS = 0.01
#: The time, in plain steps, that may be lost before the first pause; a gain of as much resets the length of pauses.
GRACE_STEPS = 3
#: The largest gain, in plain steps, that is set off against later losses.
CREDIT_STEPS = 256
#: Steps of the first pause; each later one is twice as long.
FIRST_PAUSE = 16
LONGEST_PAUSE = 1024
#: Steps of a pause that measures plain decoding; shorter ones do not, since each begins with a step run alone.
MEASURED_STEPS = 4
#: Rests grow up to this many steps, unless the first one is longer.
LONGEST_REST = 16
#: Weight of all earlier steps in a request's rate.
DISCOUNT = 0.95


class Ledger:
    """Limits the time that drafts, and searches that find none, lose against plain decoding to a fraction LOSS.

    Invariant: before they pause again, they lose at most LOSS of the time since the last pause began, plus GRACE_STEPS.
    pause: steps for which drafts still pause; may be set, to begin a pause for another reason, or to end it.
    Source: the on/off test of Cascade (arXiv:2506.20675), here with one balance and growing pauses instead of phases.
    """

    def __init__(self) -> None:
        self.pause = 0
        self._balance_s = self._elapsed_s = 0.0
        self._next_pause = FIRST_PAUSE

    def begin_rest(self, num_steps: int, lost_s: float, plain_s: float) -> None:
        """Begin a pause after a search that found no draft. lost_s: by how much plain decoding would be faster."""
        self.pause = num_steps
        self._balance_s -= lost_s
        self._check(plain_s)

    def rest(self, num_steps: int, rest_s: float = 0.0) -> None:
        """Count plain steps of a pause. rest_s: with the last of them, the time of the whole pause; before that, 0."""
        self.pause = max(self.pause - num_steps, 0)
        self._elapsed_s += rest_s

    def observe(self, num_tokens: int, step_s: float, plain_s: float) -> None:
        """Count a step that took step_s, drafting included. plain_s: what a plain step would have taken."""
        self._balance_s = min(self._balance_s + num_tokens * plain_s - step_s, CREDIT_STEPS * plain_s)
        self._elapsed_s += step_s
        self._check(plain_s)

    def _check(self, plain_s: float) -> None:
        """Pause if too much is lost; plain_s: time of a plain step."""
        if self._balance_s > GRACE_STEPS * plain_s:
            self._next_pause = FIRST_PAUSE
        elif self._balance_s < -LOSS * self._elapsed_s - GRACE_STEPS * plain_s:
            self.pause, self._next_pause = self._next_pause, min(2 * self._next_pause, LONGEST_PAUSE)
            self._balance_s = self._elapsed_s = 0.0


class Rest(NamedTuple):
    """The steps of a pause so far: when it began, how many there were, and how long they waited for other passes.

    in_passes_s: time of their own passes. is_atypical: one of these passes did not take the time of a usual step.
    num_in_pass: requests in the first pass. is_apart: one of the passes did not hold most of the other requests, so its
    time says little about plain steps.
    """

    began_s: float = 0.0
    num_steps: int = 0
    queue_us: int = 0
    in_passes_s: float = 0.0
    is_atypical: bool = False
    num_in_pass: int = 0
    is_apart: bool = False

    def extended(self, acceptances: Sequence[Acceptance]) -> Rest:
        """Return the pause with more steps."""
        return Rest(
            self.began_s,
            self.num_steps + len(acceptances),
            self.queue_us + sum(each.queue_us for each in acceptances),
            self.in_passes_s + sum(pass_s(each) for each in acceptances),
            self.is_atypical or any(each.is_atypical for each in acceptances),
            self.num_in_pass or acceptances[0].num_in_pass,
            self.is_apart or any(2 * each.num_in_separate_pass >= each.num_in_pass for each in acceptances),
        )


def pass_s(acceptance: Acceptance) -> float:
    """Return the time of a step's pass and its verification, without the call's own overhead."""
    return 1e-6 * (acceptance.forward_us + acceptance.verify_us)


class Meter:
    """Measures the steps of one request: for the costs of all requests, and for its own ledger.

    is_first: True until the first step is answered, whose pass and proposal read the prompt.
    draft_s: time of the last proposal. began_s: when it began, by the clock of the costs.
    """

    def __init__(self, costs: StepCosts) -> None:
        self.is_first = True
        self.draft_s = 0.0
        self._step_costs, self._ledger = costs, Ledger()
        self.began_s = self._sent_s = 0.0
        self._rest_len = 0
        self._tokens = self._seconds = 0.0
        self._context_len = 0
        self._rest = Rest()

    def begin(self, context_len: int, spent_s: float = 0.0) -> CostModel | None:
        """Note that a proposal begins; return what rows cost, None if the step should be a plain one.

        context_len: tokens of the request. spent_s: time already spent on the proposal.
        """
        self.began_s = self._step_costs.clock() - spent_s
        if not (self.is_first or self._ledger.pause) and self._step_costs.wants_plain:
            self._ledger.pause = MEASURED_STEPS
        return self.cost_model(context_len)

    def cost_model(self, context_len: int) -> CostModel | None:
        """Return what rows cost, None if the next step should be a plain one. context_len: tokens of the request."""
        self._context_len = context_len
        return None if self._ledger.pause else self._cost_model()

    def _cost_model(self) -> CostModel | None:
        return self._step_costs.cost_model(self._context_len)

    @property
    def num_plain(self) -> int:
        """Return how many steps are certain to be plain ones, the next one included."""
        return self._ledger.pause

    def end(self, proposal: Proposal, *, first_rest: int = 0, min_rest: int = 0) -> None:
        """Note that the proposal has been made, and begin a rest if it is empty.

        first_rest: how many plain steps follow an empty proposal before the next one is made; twice as many after each
        additional empty one, up to LONGEST_REST and as long as that saves time; 0 = no rest. min_rest: their number
        if resting saves no time.
        """
        self._sent_s = self._step_costs.clock()
        self.draft_s = self._sent_s - self.began_s
        if proposal.tree.num_nodes:
            self._rest_len = 0
        elif first_rest and not (self._ledger.pause or self.is_first):
            self._begin_rest(first_rest, min_rest)
        if self._ledger.pause and not self._rest.num_steps:
            self._rest = Rest(self._sent_s)

    def end_rest(self) -> None:
        """End a pause before its last step; its time is not counted."""
        self._ledger.pause = 0
        self._rest = Rest()

    def _begin_rest(self, first: int, least: int) -> None:
        """Begin a rest of plain steps, which can run together, if looking for drafts costs time."""
        if costs := self._cost_model():
            lost_s = self.draft_s + float(costs.seconds[0]) - costs.plain_s
            worth = max(int(lost_s / (LOSS * costs.plain_s)), least)
            self._rest_len = min(max(2 * self._rest_len, first), max(LONGEST_REST, first), worth)
            if self._rest_len:
                self._ledger.begin_rest(self._rest_len, lost_s, costs.plain_s)

    def observe(self, tree: TokenTree, acceptance: Acceptance) -> float:
        """Note the answer to a step; return its cost in seconds, without the wait for other requests' passes."""
        if self.is_first:
            self.is_first = False
            return 0.0
        if self._ledger.pause:
            return self.observe_plain([acceptance])
        num_rows, step_s = tree.num_nodes + 1, self._step_costs.clock() - self._sent_s - 1e-6 * acceptance.queue_us
        if acceptance.load or not acceptance.num_in_separate_pass:  # otherwise it is unknown what the time was spent on
            self._step_costs.observe(num_rows, acceptance.num_in_pass, acceptance.num_tokens, step_s, acceptance.load)
        if costs := self._cost_model():  # the mean cost of its size, since a single step may have been held up
            step_s = float(costs.seconds[num_rows - 1]) + self.draft_s
            self._ledger.observe(acceptance.num_tokens, step_s, costs.plain_s)
        return self._note_rate(acceptance.num_tokens, step_s)

    def observe_plain(self, acceptances: Sequence[Acceptance]) -> float:
        """Note steps of a pause, or of one that lasted longer; return the seconds that they cost together."""
        self._note_rest(acceptances)
        step_s = self._plain_s
        for _ in acceptances:
            self._note_rate(1, step_s)
        return len(acceptances) * step_s

    def observe_native(self, steps: Sequence[Step]) -> list[float]:
        """Note the steps of a burst in which native code drafts; return the cost of each in seconds."""
        for proposal, acceptance, *_ in steps:
            sizes = proposal.tree.num_nodes + 1, acceptance.num_in_pass, acceptance.num_tokens
            self._step_costs.observe_native(*sizes, pass_s(acceptance), acceptance.load)
        costs = self._cost_model()
        seconds = [
            (float(costs.seconds[proposal.tree.num_nodes]) if costs else pass_s(acceptance)) + draft_s
            for proposal, acceptance, draft_s, _ in steps
        ]
        if costs:
            self._ledger.observe(sum(step.acceptance.num_tokens for step in steps), sum(seconds), costs.plain_s)
        for step, step_s in zip(steps, seconds, strict=True):
            self._note_rate(step.acceptance.num_tokens, step_s)
        return seconds

    @property
    def rate(self) -> float:
        """Tokens of the request per second of its last steps; 0 before the first step."""
        return self._tokens / self._seconds if self._seconds else 0.0

    @property
    def _plain_s(self) -> float:
        """Time of a plain step that is one of several run together; 0 before one has been measured."""
        return costs.plain_s if (costs := self._cost_model()) else 0.0

    def _note_rate(self, num_tokens: int, step_s: float) -> float:
        self._tokens, self._seconds = DISCOUNT * self._tokens + num_tokens, DISCOUNT * self._seconds + step_s
        return step_s

    def _note_rest(self, acceptances: Sequence[Acceptance]) -> None:
        """Note steps of a pause; several may run together, so only their total time is measured."""
        self._rest = rest = self._rest.extended(acceptances)
        if self._ledger.pause > len(acceptances):
            self._ledger.rest(len(acceptances))
            return
        rest_s = self._step_costs.clock() - rest.began_s - 1e-6 * rest.queue_us
        self._ledger.rest(len(acceptances), rest_s)
        self._rest = Rest()
        if self._step_costs.drafts_in_bursts:
            rest_s = rest.in_passes_s  # measured in the same way as steps with drafts
        num_in_pass, load = acceptances[-1].num_in_pass, acceptances[-1].load
        is_mixed = max(num_in_pass, rest.num_in_pass) > 2 * min(num_in_pass, rest.num_in_pass)
        if (rest.is_atypical or is_mixed or rest.is_apart) and self._cost_model():
            self._step_costs.postpone_plain()
        elif rest.num_steps >= MEASURED_STEPS:
            self._step_costs.observe_plain(num_in_pass, rest_s / rest.num_steps, load, rest.num_steps)
        elif self._step_costs.drafts_in_bursts:
            self._step_costs.observe(1, num_in_pass, 1, rest_s / rest.num_steps, load)
        else:  # the first step ran alone, the others together
            self._step_costs.observe(1, num_in_pass, 1, rest_s - (rest.num_steps - 1) * self._plain_s, load)
