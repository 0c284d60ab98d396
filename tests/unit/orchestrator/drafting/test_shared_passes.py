"""Adaptive drafts of several requests that share their passes: of the whole batch, simulated with a clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from orchestrator.core.accept import accept_coupled
from orchestrator.core.context import Context
from orchestrator.core.proposal import Budget, Proposal, Proposer
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.step_costs import StepCosts
from orchestrator.core.types import Acceptance, HiddenStates, PassLoad, StepOptions
from orchestrator.drafting.adaptive import Adaptive
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.drafting.draft_costs import DraftCosts
from orchestrator.drafting.estimates import AcceptanceEstimates
from tests.support.decode import dependencies
from tests.support.replays import Clock

#: Seconds of a pass of plain steps that run together, of a further row, and of what single steps take beyond that.
TOGETHER_S, ROW_S, SINGLE_S = 1.0, 0.02, 0.1
BUDGET = Budget(24, 16)


@dataclass
class Crowd:
    """Requests whose steps run together.

    alpha: probability that a drafted token is accepted. level_s: time to draft one.
    """

    alpha: float
    level_s: float
    clock: Clock = field(default_factory=Clock)
    requests: list[tuple[Proposer, Context]] = field(default_factory=list)
    num_tokens: int = 0
    num_drafts: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.given: ProposerDependencies = replace(
            dependencies(), step_costs=StepCosts(self.clock), draft_costs=DraftCosts(), estimates=AcceptanceEstimates()
        )

    def admit(self, num_requests: int, build: Callable[[Crowd], Proposer]) -> None:
        """Begin so many requests in the place of those before them."""
        self.requests = [(build(self), Context([0])) for _ in range(num_requests)]

    def step(self) -> None:
        """Run a step of each; plain steps that are known beforehand are quicker."""
        for proposer, context in self.requests:
            proposer.begin(context, Sampling(), BUDGET)
        proposals, sent_s = [], []
        for proposer, context in self.requests:
            proposals.append(proposer.propose(context, Sampling(), BUDGET))
            sent_s.append(self.clock.now_s)
        began_s, num_nodes = self.clock.now_s, sum(each.tree.num_nodes for each in proposals)
        is_burst = all(proposer.num_plain for proposer, _ in self.requests)
        self.clock.now_s += TOGETHER_S + ROW_S * num_nodes + (0.0 if is_burst else SINGLE_S)
        accepted = [
            accept_coupled(each.tree, [len(context) + int(depth) for depth in each.tree.depths])
            for each, (_, context) in zip(proposals, self.requests, strict=True)
        ]
        count, num_tokens = len(accepted), sum(len(each.path) + 1 for each in accepted)
        load = PassLoad(count + num_nodes, count, 1.0 + num_nodes / count, num_tokens / count)
        for (proposer, context), proposal, path, at_s in zip(self.requests, proposals, accepted, sent_s, strict=True):
            acceptance = Acceptance(*path, queue_us=int((began_s - at_s) * 1e6), num_in_pass=count, load=load)
            context.commit(acceptance.tokens(proposal.tree))
            proposer.observe(proposal.tree, acceptance)
        self.num_tokens += num_tokens

    def rate(self, num_steps: int) -> float:
        """Return the tokens per second and request of so many steps."""
        began_s, before = self.clock.now_s, self.num_tokens
        for _ in range(num_steps):
            self.step()
        return (self.num_tokens - before) / (self.clock.now_s - began_s) / len(self.requests)


class Head(Proposer):
    """Drafts up to five tokens of the text 0, 1, 2, …, and needs hidden states; drafts of one pass are computed together."""

    name = "head"
    options = StepOptions(features_from=0, hidden_states=HiddenStates.LAST)

    def __init__(self, crowd: Crowd) -> None:
        self.crowd = crowd

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        crowd, length = self.crowd, budget.clipped(5)
        if not length:
            return Proposal.empty()
        crowd.num_drafts += 1
        crowd.clock.now_s += crowd.level_s * length / len(crowd.requests)
        right = crowd.rng.random(length) < crowd.alpha
        return Proposal.chain([len(context) + i if right[i] else 10**6 for i in range(length)], self.name)


def adaptive(crowd: Crowd) -> Adaptive:
    return Adaptive(Head(crowd), crowd.given, 16)


@pytest.mark.parametrize("alpha", [0.5, 0.8])
@pytest.mark.parametrize("num_requests", [1, 4, 8])
def test_a_head_that_pays_is_used_by_all_who_share_a_pass(num_requests: int, alpha: float) -> None:
    rates = []
    for build in (Head, adaptive):
        crowd = Crowd(alpha, 0.03)
        crowd.admit(num_requests, build)
        crowd.rate(300)
        rates.append(crowd.rate(800))
    assert rates[1] >= 0.95 * rates[0]


@pytest.mark.parametrize("num_requests", [1, 4, 16])
def test_a_head_that_never_pays_costs_a_pass_next_to_nothing_however_many_share_it(num_requests: int) -> None:
    crowd = Crowd(0.1, 0.6)
    crowd.admit(num_requests, adaptive)
    crowd.rate(500)
    assert crowd.rate(2000) >= 0.98 * 1.0 / TOGETHER_S
    assert crowd.num_drafts


@pytest.mark.parametrize("num_requests", [1, 4])
def test_a_head_that_was_slow_once_is_used_again(num_requests: int) -> None:
    crowd = Crowd(0.8, 0.03)
    crowd.admit(num_requests, adaptive)
    crowd.rate(100)
    crowd.level_s = 1.5
    crowd.rate(40)
    crowd.level_s = 0.03
    crowd.rate(6000)
    crowd.admit(num_requests, adaptive)
    before = crowd.num_drafts
    crowd.rate(200)
    assert crowd.num_drafts - before > 100 * num_requests
