"""The drafters as sources of `auto`: used where they pay, tried now and then, and otherwise left alone."""

from __future__ import annotations

from orchestrator.core.context import Context
from orchestrator.core.cost_model import CostModel
from orchestrator.core.methods import METHODS
from orchestrator.core.proposal import Budget, Proposal, Proposer
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, StepOptions
from orchestrator.proposers.dependencies import ProposerDependencies
from orchestrator.proposers.draft_costs import TRIAL_STEPS, HeadFigures
from orchestrator.proposers.ledger import MEASURED_STEPS
from orchestrator.proposers.ranks import RankEstimates

#: The methods that are tried, each if its drafter is loaded; not `eagle`, the drafter of `eagle2` with shorter drafts.
HEADS = ("draft_model", "medusa", "eagle2", "eagle3", "redrafter")
#: A head is used if it promises this fraction more tokens per second than the request has without it.
MARGIN = 0.05
#: A head that has not been wanted for IDLE_STEPS steps is let go. No head is then used for REST_STEPS steps, and for
#: twice as many each time that a head has made the request slower.
IDLE_STEPS, REST_STEPS = 8, 32
#: Steps after which the rate with a head in use is compared with the rate without it.
REVIEW_STEPS = 16


class HeadsOfAuto:
    """The heads of one request: at most one is in use, and receives the target's hidden states.

    Invariant: whether a head is called depends on earlier steps and on the other candidates of this step, never on the
    head's own draft.
    """

    def __init__(self, dependencies: ProposerDependencies) -> None:
        self._dependencies, self._draft_costs = dependencies, dependencies.draft_costs
        self._names = [name for name in HEADS if METHODS[name].drafter in dependencies.drafters]
        self._built: dict[str, Proposer] = {}
        self._name = ""
        self._range = 0
        self._trial_left = self._num_idle = self._rest = 0  # drafts left of a trial; steps without one; steps of a rest
        self._next_rest = REST_STEPS
        self._is_first = False  # the next draft is the head's first since it was idle, and reads the text since then
        self._was_called = False  # the head has drafted for the step that is not answered yet
        self._has_states = False  # that step's answer brings the hidden states that the head reads
        self._was_trial = False  # a trial was under way when heads were last chosen
        self._drafted = Proposal.empty()
        self._before = 0.0  # tokens per second before the head was in use
        self._review: tuple[int, int, float] = (0, 0, 0.0)  # steps, tokens, seconds of the head in use

    @property
    def name(self) -> str:
        """The method of the head in use; empty while no head is in use."""
        return self._name

    @property
    def options(self) -> StepOptions:
        """What the head in use needs from the step."""
        return self._built[self._name].options if self._has_states else StepOptions()

    @property
    def ranks(self) -> RankEstimates:
        """The chances of the nodes of the head in use."""
        return RankEstimates(self._dependencies.estimates, self._name, self._range)

    def choose(self, rate: float, tokens_left: int, costs: CostModel, temperature_range: int) -> None:
        """Start using a head, or let it go, from the next step on.

        rate: recent tokens per second of the request without a head.
        """
        self._range = temperature_range
        if self._name:
            ends_trial = self._was_trial and not self._trial_left
            self._was_trial = bool(self._trial_left)
            if self._num_idle >= IDLE_STEPS or (
                ends_trial and self._gain(self._name, self._before, tokens_left, costs) <= 0.0
            ):
                self.let_go()
            return
        if self._rest or not self._names or not rate or tokens_left < 2 * TRIAL_STEPS:
            return
        best = max(self._names, key=lambda name: self._gain(name, rate, tokens_left, costs))
        if self._gain(best, rate, tokens_left, costs) > 0.0:
            self._use(best, rate, 0)
        elif self._draft_costs.may_try:
            self._use(min(self._names, key=lambda name: self._of(name).tokens.num_values), rate, TRIAL_STEPS)

    def wants(self, rate: float, costs: CostModel) -> bool:
        """Return whether the head in use should draft for this step. rate: of the other candidates' tree."""
        if not (self._name and self._has_states):
            return False
        return bool(self._trial_left) or self._of(self._name).rate(costs) > (1.0 + MARGIN) * rate

    def note_pause(self, num_plain: int) -> None:
        """Note how many plain steps follow; they return no hidden states, so let the head go before a long pause."""
        if self._name and num_plain > MEASURED_STEPS:
            self.let_go()
        self._has_states = bool(self._name) and not num_plain

    def begin(self, context: Context, sampling: Sampling, budget: Budget) -> None:
        """Let the head begin its draft."""
        self._built[self._name].begin(context, sampling, budget)

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return the head's draft."""
        clock = self._dependencies.step_costs.clock
        began_s = clock()
        self._drafted = self._built[self._name].propose(context, sampling, budget).cut(budget)
        self._was_called, took_s, known = True, clock() - began_s, self._of(self._name)
        if self._is_first:
            self._note(known._replace(first_s=known.first_s.updated(took_s)))
        else:
            self._note(known._replace(draft_s=known.draft_s.updated(took_s)))
        self._is_first = False
        return self._drafted

    def observe(self, tree: TokenTree, acceptance: Acceptance, step_s: float) -> None:
        """Learn how far the head's draft agrees with the text, and what the step cost, drafting included."""
        self._draft_costs.elapsed_s += step_s
        if not self._name:
            self._rest -= self._rest > 0
            return
        self._built[self._name].observe(tree, acceptance)
        if self._trial_left:  # all requests of the pass wait for it
            self._draft_costs.tried_s += step_s * acceptance.num_in_pass
        self._num_idle = 0 if self._was_called else self._num_idle + 1
        if self._was_called:
            self._learn(tree, acceptance)
        self._check(acceptance.num_tokens, step_s)

    def let_go(self) -> None:
        """Stop using the head, and use no head for a while."""
        if not self._name:
            return
        self._name = ""
        self._rest, self._trial_left, self._was_called = self._next_rest, 0, False

    def close(self) -> None:
        """Free what the heads hold."""
        for proposer in self._built.values():
            proposer.close()

    def _learn(self, tree: TokenTree, acceptance: Acceptance) -> None:
        self._was_called, known = False, self._of(self._name)
        if self._drafted.tree.num_nodes:
            agreed = self.ranks.learn(self._drafted.tree, acceptance.tokens(tree))
            rows = known.rows.updated(self._drafted.tree.num_nodes)
            known = known._replace(tokens=known.tokens.updated(1.0 + agreed), rows=rows)
        else:
            known = known._replace(tokens=known.tokens.updated(1.0))
        self._note(known)
        self._trial_left = max(self._trial_left - 1, 0)

    def _check(self, num_tokens: int, step_s: float) -> None:
        """Let the head go if the request has become slower with it."""
        num_steps, tokens, seconds = self._review
        self._review = num_steps + 1, tokens + num_tokens, seconds + step_s
        if self._name and num_steps + 1 >= REVIEW_STEPS:
            if self._review[1] < self._before * self._review[2]:
                self._next_rest *= 2
                self.let_go()
            self._review = 0, 0, 0.0

    def _use(self, name: str, rate: float, trial_steps: int) -> None:
        """Start using a head. rate: as in `choose`. trial_steps: drafts of a trial; 0 = the head is expected to pay."""
        if name not in self._built:
            assert self._dependencies.build is not None
            self._built[name] = self._dependencies.build(name)
        self._name, self._before = name, rate
        self._trial_left, self._was_trial = trial_steps, bool(trial_steps)
        self._num_idle, self._review, self._is_first = 0, (0, 0, 0.0), True

    def _gain(self, name: str, rate: float, tokens_left: int, costs: CostModel) -> float:
        """Return the seconds that the head promises to save on the rest of the text; negative if it would cost time."""
        known = self._of(name)
        if known.tokens.num_values < TRIAL_STEPS:
            return float("-inf")
        saved_s = tokens_left * (1.0 / ((1.0 + MARGIN) * rate) - known.step_s(costs) / known.tokens.value)
        return saved_s - known.first_s.value

    def _of(self, name: str) -> HeadFigures:
        return self._draft_costs.of(name, self._range)

    def _note(self, known: HeadFigures) -> None:
        self._draft_costs.by_head[self._name, self._range] = known
