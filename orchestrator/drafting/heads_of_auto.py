"""The drafters as sources of `auto`: each is tried occasionally, and used where it pays."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from orchestrator.core.context import Context
from orchestrator.core.cost_model import CostModel
from orchestrator.core.methods import METHODS
from orchestrator.core.proposal import Budget, Proposal, Proposer
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, StepOptions
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.drafting.draft_costs import TRIAL_STEPS, HeadFigures
from orchestrator.drafting.ledger import MEASURED_STEPS
from orchestrator.drafting.ranks import RankEstimates

#: The methods that are tried, each if its drafter is loaded; not `eagle`, the drafter of `eagle2` with shorter drafts.
HEADS = ("draft_model", "medusa", "eagle2", "eagle3", "redrafter")
#: A head is used if it promises this fraction more tokens per second than the request has without it.
MARGIN = 0.05
#: A head that has not drafted for IDLE_STEPS steps is let go. No head is then used for REST_STEPS steps, and for twice
#: as many each time that a head has made the request slower.
IDLE_STEPS, REST_STEPS = 8, 32
#: Steps after which the rate with a head in use is compared with the rate without it.
REVIEW_STEPS = 16


class State(Enum):
    """What a request does with heads."""

    READY = "no head is in use, and the next choice may begin to use one"
    TRIAL = "a head drafts at every step, to learn whether it pays"
    TRIED = "the trial's drafts have been made, and the next choice decides whether the head stays in use"
    IN_USE = "a head drafts at the steps where it is expected to pay"
    RESTING = "no head is used for a number of steps"


#: The states that may follow each state.
FOLLOWING = {
    State.READY: {State.TRIAL, State.IN_USE},
    State.TRIAL: {State.TRIED, State.RESTING},
    State.TRIED: {State.IN_USE, State.RESTING},
    State.IN_USE: {State.RESTING},
    State.RESTING: {State.READY},
}


@dataclass
class HeadInUse:
    """The head in use, from its choice until it is let go.

    rate_without: tokens per second of the request before the head was in use. drafted: its draft for the step that is
    not answered yet, or None if it does not draft for that step. has_states: that step's answer brings the hidden
    states that the head reads. is_first: its next draft is the first one, for which it reads the text that it has
    missed. num_idle: steps since its last draft. num_steps, num_tokens, seconds: of the steps since the last review.
    """

    name: str
    proposer: Proposer
    rate_without: float
    drafted: Proposal | None = None
    has_states: bool = False
    is_first: bool = True
    num_idle: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    seconds: float = 0.0


class HeadsOfAuto:
    """The heads of one request: at most one is in use, and receives the target's hidden states.

    Invariant: whether a head is called depends on earlier steps and on the other candidates of this step, never on the
    head's own draft. A head is in use in the states TRIAL, TRIED and IN_USE.
    """

    def __init__(self, dependencies: ProposerDependencies) -> None:
        self._dependencies, self._draft_costs = dependencies, dependencies.draft_costs
        self._names = [name for name in HEADS if METHODS[name].drafter in dependencies.drafters]
        self._built: dict[str, Proposer] = {}
        self._state = State.READY
        self._head: HeadInUse | None = None
        self._steps_left = 0  # drafts of the trial, or steps of the rest
        self._next_rest = REST_STEPS
        self._range = 0  # the request's temperature range

    @property
    def name(self) -> str:
        """The method of the head in use; empty while no head is in use."""
        return self._head.name if self._head else ""

    @property
    def options(self) -> StepOptions:
        """What the head in use needs from the step."""
        return self._head.proposer.options if self._head and self._head.has_states else StepOptions()

    @property
    def ranks(self) -> RankEstimates:
        """The probabilities of the nodes of the head in use."""
        return RankEstimates(self._dependencies.estimates, self.name, self._range)

    def choose(self, rate: float, tokens_left: int, costs: CostModel, temperature_range: int) -> None:
        """Start using a head, or let it go, from the next step on.

        rate: recent tokens per second of the request without a head.
        """
        self._range = temperature_range
        if head := self._head:
            is_tried = self._state is State.TRIED
            fails_trial = is_tried and self._gain(head.name, head.rate_without, tokens_left, costs) <= 0.0
            if head.num_idle >= IDLE_STEPS or fails_trial:
                self.let_go()
            elif is_tried:
                self._enter(State.IN_USE)
        elif self._state is State.READY and self._names and rate and tokens_left >= 2 * TRIAL_STEPS:
            best = max(self._names, key=lambda name: self._gain(name, rate, tokens_left, costs))
            if self._gain(best, rate, tokens_left, costs) > 0.0:
                self._enter(State.IN_USE, self._new_head(best, rate))
            elif self._draft_costs.may_try:
                least_known = min(self._names, key=lambda name: self._of(name).tokens.num_values)
                self._enter(State.TRIAL, self._new_head(least_known, rate))

    def wants(self, rate: float, costs: CostModel) -> bool:
        """Return whether the head in use should draft for this step. rate: of the other candidates' tree."""
        if not (self._head and self._head.has_states):
            return False
        return self._state is State.TRIAL or self._of(self._head.name).rate(costs) > (1.0 + MARGIN) * rate

    def note_pause(self, num_plain: int) -> None:
        """Note how many plain steps follow; they return no hidden states, so let the head go before a long pause."""
        if num_plain > MEASURED_STEPS:
            self.let_go()
        if self._head:
            self._head.has_states = not num_plain

    def begin(self, context: Context, sampling: Sampling, budget: Budget) -> None:
        """Let the head begin its draft."""
        assert self._head
        self._head.proposer.begin(context, sampling, budget)

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return the head's draft."""
        assert self._head
        head, clock = self._head, self._dependencies.step_costs.clock
        began_s = clock()
        head.drafted = head.proposer.propose(context, sampling, budget)
        took_s, known = clock() - began_s, self._of(head.name)
        if head.is_first:
            self._note(head.name, known._replace(first_s=known.first_s.updated(took_s)))
        else:
            self._note(head.name, known._replace(draft_s=known.draft_s.updated(took_s)))
        head.is_first = False
        return head.drafted

    def observe(self, tree: TokenTree, acceptance: Acceptance, step_s: float) -> None:
        """Learn how far the head's draft agrees with the text, and what the step cost, drafting included."""
        self._draft_costs.elapsed_s += step_s
        if not self._head:
            if self._state is State.RESTING:
                self._count_down(State.READY)
            return
        self._head.proposer.observe(tree, acceptance)
        if self._state is State.TRIAL:  # all requests of the pass wait for it
            self._draft_costs.tried_s += step_s * acceptance.num_in_pass
        if self._head.drafted:
            self._learn(self._head, self._head.drafted, acceptance.tokens(tree))
        else:
            self._head.num_idle += 1
        self._review(self._head, acceptance.num_tokens, step_s)

    def let_go(self) -> None:
        """Stop using the head, if one is in use, and use no head for a while."""
        if self._head:
            self._enter(State.RESTING)

    def close(self) -> None:
        """Free what the heads hold."""
        for proposer in self._built.values():
            proposer.close()

    def _enter(self, state: State, head: HeadInUse | None = None) -> None:
        """Change the state. head: the one that comes into use."""
        assert state in FOLLOWING[self._state]
        self._state = state
        if state is State.RESTING:
            self._head, self._steps_left = None, self._next_rest
        elif head:
            self._head, self._steps_left = head, TRIAL_STEPS

    def _count_down(self, state: State) -> None:
        """Note one of the steps that a trial or a rest lasts; enter the state after the last one."""
        self._steps_left -= 1
        if not self._steps_left:
            self._enter(state)

    def _learn(self, head: HeadInUse, drafted: Proposal, tokens: list[int]) -> None:
        """Note how many tokens the head's draft would have brought. tokens: those that the step committed."""
        head.drafted, head.num_idle, known, agreed = None, 0, self._of(head.name), 0
        if drafted.tree.num_nodes:
            agreed = self.ranks.learn(drafted.tree, tokens)
            known = known._replace(rows=known.rows.updated(drafted.tree.num_nodes))
        self._note(head.name, known._replace(tokens=known.tokens.updated(1.0 + agreed)))
        if self._state is State.TRIAL:
            self._count_down(State.TRIED)

    def _review(self, head: HeadInUse, num_tokens: int, step_s: float) -> None:
        """Let the head go if the request has become slower with it."""
        head.num_steps += 1
        head.num_tokens += num_tokens
        head.seconds += step_s
        if head.num_steps < REVIEW_STEPS:
            return
        if head.num_tokens < head.rate_without * head.seconds:
            self._next_rest *= 2
            self.let_go()
        head.num_steps, head.num_tokens, head.seconds = 0, 0, 0.0

    def _new_head(self, name: str, rate: float) -> HeadInUse:
        if name not in self._built:
            assert self._dependencies.build is not None
            self._built[name] = self._dependencies.build(name)
        return HeadInUse(name, self._built[name], rate)

    def _gain(self, name: str, rate: float, tokens_left: int, costs: CostModel) -> float:
        """Return the seconds that the head promises to save on the rest of the text; negative if it would cost time."""
        known = self._of(name)
        if known.tokens.num_values < TRIAL_STEPS:
            return float("-inf")
        saved_s = tokens_left * (1.0 / ((1.0 + MARGIN) * rate) - known.step_s(costs) / known.tokens.value)
        return saved_s - known.first_s.value

    def _of(self, name: str) -> HeadFigures:
        return self._draft_costs.of(name, self._range)

    def _note(self, name: str, known: HeadFigures) -> None:
        self._draft_costs.by_head[name, self._range] = known
