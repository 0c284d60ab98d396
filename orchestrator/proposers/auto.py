"""The method `auto`: at every step the proposer and the tree that promise the most tokens per second, or no draft."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field

from orchestrator.core.context import Context
from orchestrator.core.methods import METHODS
from orchestrator.core.proposal import Budget, Proposal, Proposer
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.step_costs import StepCosts
from orchestrator.core.tree import MAX_NODES, TokenTree
from orchestrator.core.types import Acceptance, FloatArray
from orchestrator.proposers.dependencies import ProposerDependencies
from orchestrator.proposers.estimates import AcceptanceEstimates
from orchestrator.proposers.parameters import MethodConfig

#: The proposers that `auto` chooses from, with their parameters: longer drafts than their defaults, since they are cut.
ARMS: dict[str, dict[str, Any]] = {
    "prompt_lookup": {"draft_len": 24},
    "suffix": {"factor": 8.0, "min_prob": 0.05, "draft_len": 48},
    "predicted": {},
}
#: A draft is sent only if it promises this many tokens more than a plain step and the time that it takes longer.
MARGIN = 0.02
#: The part of a request's time that drafts may lose against plain decoding before they pause.
LOSS = 0.01
#: Plain steps that may be lost before the first pause.
GRACE_STEPS = 4
#: Most plain steps of gain that are set off against later losses.
CREDIT_STEPS = 256
#: Steps of the first pause; each further one is twice as long.
FIRST_PAUSE = 32
LONGEST_PAUSE = 1024
#: A proposer that takes more than this part of a plain step, and gains nothing, is called at every PROBE-th step only.
CHEAP = 0.05
PROBE = 8
#: Weight of all earlier measurements in the mean time of a proposal.
DISCOUNT = 0.9
#: Weight of all earlier steps in the rate, per step.
RATE_DISCOUNT = 0.9


class AutoConfig(MethodConfig):
    """max_nodes: most draft nodes of a tree; fewer are sent where more would not pay. tree: trees, or chains alone."""

    max_nodes: int = Field(48, ge=0, le=MAX_NODES)
    tree: bool = True

    @property
    def is_chain(self) -> bool:
        """True when every draft is one path."""
        return not self.tree


class Choice(NamedTuple):
    """A proposal, and its expected tokens less what its time is worth in tokens."""

    value: float
    proposal: Proposal


@dataclass(eq=False)
class Unsettled:
    """A proposal whose outcome is not known yet. node, position: how far it agrees with the text."""

    proposal: Proposal
    position: int
    node: int = 0


@dataclass(eq=False)
class Arm:
    """A proposer that may be chosen.

    draft_s: how long a proposal takes on average; the first one, which reads the prompt, does not count.
    gain: what its proposals were worth on average, in tokens, with those that were empty.
    """

    name: str
    proposer: Proposer
    draft_s: float = 0.0
    gain: float = 0.0
    has_read_prompt: bool = False
    unsettled: list[Unsettled] = field(default_factory=list)

    def propose(self, context: Context, sampling: Sampling, budget: Budget, costs: StepCosts) -> Proposal:
        """Return the arm's proposal and remember it until the text shows what it was worth."""
        began_s = costs.clock()
        proposal = self.proposer.propose(context, sampling, budget).cut(budget)
        if self.has_read_prompt:
            self.draft_s = DISCOUNT * self.draft_s + (1 - DISCOUNT) * (costs.clock() - began_s)
        self.has_read_prompt = True
        if proposal.tree.num_nodes:
            self.unsettled.append(Unsettled(proposal, len(context)))
        return proposal

    def settle(self, ids: Sequence[int], estimates: AcceptanceEstimates) -> None:
        """Compare the proposals with the text that has come since; whether they were sent makes no difference."""
        self.unsettled = [each for each in self.unsettled if not _is_settled(each, ids, estimates)]


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
        if self._balance_s < -LOSS * self._elapsed_s - GRACE_STEPS * plain_s:
            self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, LONGEST_PAUSE)
            self._balance_s = 0.0


class Auto(Proposer):
    """Sends the draft whose expected tokens per second are highest, cut to the nodes that pay; often no draft at all.

    A node's chance is the product of its path's estimates, and the expected tokens E of a step are 1 + the sum of the
    chances of the nodes that are sent. No node is likelier than its parent, so the best n nodes of a proposal are its n
    likeliest ones. n and the proposer maximise E − Θ · seconds, where Θ is the rate of the whole batch, in tokens per
    second, over the last steps: the best rate in the long run is the one at which the best step gains nothing over it
    (Dinkelbach 1967), and a second of the pass costs the other requests their tokens too.
    Every arm is judged by the text that came, whether its draft was sent or not: under `coupled` the text does not
    depend on the drafts, so agreement with it is the exact outcome.
    Invariant: whether and how much is drafted depends on what was known before the step's draw, so every acceptance
    rule keeps its law.
    Source: full-information choice, HedgeSpec (arXiv:2510.20064); size by marginal cost, TurboSpec (arXiv:2406.14066);
    docs/methods/auto.md.
    """

    name = "auto"

    def __init__(self, config: AutoConfig, dependencies: ProposerDependencies) -> None:
        self._costs = dependencies.step_costs
        self._estimates = AcceptanceEstimates(dependencies.estimates)
        self._max_nodes = config.max_nodes
        self._arms = [Arm(name, proposer) for name, proposer in _proposers(config, dependencies)]
        self._ledger = Ledger()
        self._num_steps = 0
        self._tokens = self._seconds = 0.0  # of the batch in the last steps, discounted
        self._text: list[int] = []
        self._began_s = self._sent_s = 0.0

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return the best proposal, or a bare root."""
        self._began_s, self._text = self._costs.clock(), context.ids
        budget = Budget(min(budget.max_nodes, self._max_nodes), budget.max_depth)
        load = self._costs.others()
        costs = self._costs.seconds(budget.max_nodes + 1, load.rows)
        best = Choice(MARGIN, Proposal.empty())
        for arm in self._arms:
            if not self._is_due(arm, costs):
                continue
            proposal = arm.propose(context, sampling, budget, self._costs)
            if not self._seconds:
                continue
            choice = self._cut(proposal, arm.draft_s, costs)
            arm.gain = DISCOUNT * arm.gain + (1 - DISCOUNT) * choice.value
            if choice.value > best.value and not self._ledger.is_pausing:
                best = choice
        self._sent_s = self._costs.clock()
        return best.proposal

    def observe(self, tree: TokenTree, acceptance: Acceptance) -> None:
        """Learn what the step cost, and how far each arm's drafts agree with the text."""
        now_s, num_tokens = self._costs.clock(), acceptance.num_tokens
        self._num_steps += 1
        if self._num_steps > 1:  # the first pass holds the prompt
            self._costs.observe(tree.num_nodes + 1, acceptance.num_in_pass, num_tokens, now_s - self._sent_s)
            load = self._costs.others()
            self._ledger.observe(num_tokens, now_s - self._began_s, self._costs.seconds(1, load.rows)[0])
            self._tokens = RATE_DISCOUNT * self._tokens + num_tokens + load.tokens
            self._seconds = RATE_DISCOUNT * self._seconds + now_s - self._began_s
        for arm in self._arms:
            arm.settle(self._text, self._estimates)

    def close(self) -> None:
        """Free what the arms hold."""
        for arm in self._arms:
            arm.proposer.close()

    def _is_due(self, arm: Arm, costs: Sequence[float]) -> bool:
        """Return whether an arm is called now: cheap ones always, the others while they gain, and at probes."""
        is_cheap = not costs or arm.draft_s < CHEAP * costs[0]
        return is_cheap or arm.gain >= 0.0 or self._num_steps % PROBE == 0

    def _cut(self, proposal: Proposal, draft_s: float, costs: Sequence[float]) -> Choice:
        """Return the proposal with the nodes that are worth their time, and what it gains over a plain step."""
        rate = self._tokens / self._seconds
        if not proposal.tree.num_nodes:
            return Choice(-rate * draft_s, proposal)
        chances = path_chances(proposal, self._estimates)
        order = np.argsort(-chances, kind="stable")  # of equal chances the parent first
        longer_s = np.array(costs[1 : len(order) + 1]) - costs[0] + draft_s
        gains = chances[order].cumsum() - rate * longer_s
        best = int(gains.argmax())
        kept = np.sort(order[: best + 1]).astype(np.int32) + 1
        return Choice(float(gains[best]), proposal.only(kept))


def path_chances(proposal: Proposal, estimates: AcceptanceEstimates) -> FloatArray:
    """Return for the nodes 1…m the estimated probability that all nodes of their paths are accepted, (m,) float64."""
    chances = [1.0]
    for node, parent in enumerate(proposal.tree.parents.tolist()):
        chances.append(chances[parent] * estimates.probability(_kind(proposal, node + 1)))
    return np.array(chances[1:])


def _kind(proposal: Proposal, node: int) -> Hashable:
    """Return what a node's estimate depends on: its source, and its proposer's evidence or else its depth."""
    evidence = proposal.evidence[node - 1] if proposal.evidence else int(proposal.tree.depths[node])
    return proposal.sources[node - 1], evidence


def _is_settled(draft: Unsettled, text: Sequence[int], estimates: AcceptanceEstimates) -> bool:
    """Count the outcomes that the text decides; return whether no node's outcome is left open."""
    tree = draft.proposal.tree
    while children := tree.children[draft.node]:
        if draft.position == len(text):
            return False
        token = text[draft.position]
        for candidate, node in children.items():
            estimates.observe(_kind(draft.proposal, node), candidate == token)
        if token not in children:
            return True
        draft.node, draft.position = children[token], draft.position + 1
    return True


def _proposers(config: AutoConfig, dependencies: ProposerDependencies) -> Iterator[tuple[str, Proposer]]:
    """Build the arms of a request."""
    from orchestrator.proposers.registry import load

    for name, longer in ARMS.items():
        if name != "predicted" or dependencies.prediction:
            method = METHODS[name]
            chains = {} if config.tree or name != "suffix" else {"tree": False}
            parameters = load(method.config)(**longer | chains)
            yield name, load(method.proposer)(parameters, replace(dependencies, method=method))
