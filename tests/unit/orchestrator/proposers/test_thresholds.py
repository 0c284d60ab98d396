"""How likely nodes and levels must seem: as likely as pays, where measured times may decide it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from orchestrator.core.context import Context
from orchestrator.core.cost_model import CostModel, Curve, PassCosts
from orchestrator.core.proposal import Budget, Proposal, Step
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.step_costs import StepCosts
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, DraftResponse, HeadInput
from orchestrator.proposers.draft_costs import DraftCosts
from orchestrator.proposers.drafters import DrafterProposer, DraftModel, HeadProposer
from orchestrator.proposers.registry import select_method
from orchestrator.proposers.thresholds import LEAST, LEVEL_FACTOR, MOST, ROW_FACTOR, paying_thresholds
from tests.support.decode import dependencies

TREE = TokenTree.from_paths([[4, 5], [6]])
BUDGET = Budget(20, 5)
#: A plain pass takes 1 s and each further row 0.1 s.
LINEAR = PassCosts(Curve(np.array([1.0, 2.0]), np.array([1.0, 1.1]), 0.1))
GREEDY = Sampling()
LOADED = frozenset({"draft", "eagle3"})


class Line:
    """A drafter that takes the time that a test says."""

    has_given_up, use = False, None

    def __init__(self, clock: Clock) -> None:
        self.heads: list[HeadInput] = []
        self.clock, self.takes_s = clock, 0.0

    def propose(self, context: Context, sampling: Sampling, budget: Budget, head: HeadInput) -> DraftResponse:
        self.heads.append(head)
        self.clock.now_s += self.takes_s
        return DraftResponse(TREE, cached_len=len(context) - 1)


class Clock:
    """A clock that only a test moves."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Deployment:
    """A request's drafter, and what the process knows of costs."""

    def __init__(self, method: str, measured: PassCosts | None = LINEAR, **parameters: Any) -> None:
        clock = Clock()
        self.line, self.costs, self.draft_costs = Line(clock), StepCosts(clock, measured), DraftCosts()
        config: Any = select_method(method, json.dumps(parameters), LOADED, {}).config
        own = dependencies(
            method, drafter_client=lambda name: self.line, step_costs=self.costs, draft_costs=self.draft_costs
        )
        kind = DraftModel if method == "draft_model" else HeadProposer
        self.proposer: DrafterProposer = kind(config, own)  # type: ignore[arg-type]

    def asked(self, sampling: Sampling = GREEDY, takes_s: float = 0.0) -> tuple[float, float]:
        """Draft once; return what the drafter was told of how likely nodes and levels must seem."""
        self.line.takes_s = takes_s
        rows = np.ones((1, 1), np.float32)
        self.proposer.observe(TREE, Acceptance((), 1, features=rows, features_start=18))
        self.proposer.propose(Context(list(range(20))), sampling, BUDGET)
        return self.line.heads[-1].min_prob, self.line.heads[-1].min_reach


def cost_model(row_s: float, rate: float) -> CostModel:
    return CostModel(1.0 + row_s * np.arange(4.0), np.full(4, row_s), 0.0, rate)


@pytest.mark.parametrize(("row_s", "level_s", "rate"), [(0.1, 0.05, 1.0), (0.02, 0.2, 2.0)])
def test_a_node_pays_for_its_row_and_a_level_for_its_time_and_a_row(row_s: float, level_s: float, rate: float) -> None:
    found = paying_thresholds(cost_model(row_s, rate), level_s, 3)
    assert found.min_prob == pytest.approx(ROW_FACTOR * rate * row_s)
    assert found.min_reach == pytest.approx(found.min_prob + LEVEL_FACTOR * rate * level_s)


def test_a_row_costs_the_mean_over_the_largest_draft() -> None:
    stairs = CostModel(np.array([1.0, 1.0, 1.3, 1.3, 1.6]), np.zeros(5), 0.0, 1.0)
    found = [paying_thresholds(stairs, 0.0, most_nodes).min_prob for most_nodes in (1, 2, 4, 128)]
    assert found == pytest.approx([LEAST, ROW_FACTOR * 0.15, ROW_FACTOR * 0.15, ROW_FACTOR * 0.15])


def test_no_price_fills_trees_or_ends_all_drafts() -> None:
    assert paying_thresholds(cost_model(0.0, 1.0), 0.0, 3) == (LEAST, LEAST)
    assert paying_thresholds(cost_model(5.0, 1.0), 0.01, 3) == pytest.approx((MOST, MOST + 0.01 * LEVEL_FACTOR))
    assert paying_thresholds(cost_model(5.0, 1.0), 9.0, 3) == (MOST, 1.0)


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_thresholds_follow_from_what_rows_and_levels_cost(method: str) -> None:
    deployment, constant = Deployment(method), {"eagle3": (0.4, 0.0), "draft_model": (0.0, 0.4)}[method]
    assert deployment.asked(takes_s=9.0) == constant
    assert deployment.asked(takes_s=0.3) == constant, "the first call has read the prompt and says nothing"
    expected = paying_thresholds(cost_model(0.1, 1.0), 0.1, 3)
    assert deployment.asked() == pytest.approx(expected), "the last level of three holds no node"
    other = Deployment(method, PassCosts(Curve(np.array([1.0, 2.0]), np.array([1.0, 1.01]), 0.01)))
    other.draft_costs.note_draft(method, 3, 0.3)
    assert other.asked() == pytest.approx(paying_thresholds(cost_model(0.01, 1.0), 0.1, 3))


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.8, seed=1, rule=Rule.REJECTION),
        Sampling(0.8, seed=1, rule=Rule.BLOCK),
        Sampling(0.8, seed=1, rule=Rule.TYPICAL),
        Sampling(rule=Rule.TYPICAL),
    ],
)
def test_where_the_text_depends_on_the_drafts_no_measured_time_decides_them(method: str, sampling: Sampling) -> None:
    plain = Deployment(method).asked(sampling)
    for parameters in tuple[dict[str, int], ...](({}, {"draft_temperature": 0})):
        deployment = Deployment(method, **parameters)
        deployment.draft_costs.note_draft(method, 1, 0.1)
        assert deployment.asked(sampling) == plain


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_constants_remain_where_the_request_sets_them_or_costs_are_unknown_or_shared(method: str) -> None:
    def known(measured: PassCosts | None = LINEAR, **parameters: Any) -> Deployment:
        deployment = Deployment(method, measured, **parameters)
        deployment.draft_costs.note_draft(method, 1, 0.1)
        return deployment

    constant = Deployment(method).asked()
    assert known().asked() != constant
    assert known(measured=None).asked() == constant
    assert known(min_prob=0.4).asked() == constant
    shared = known()
    shared.costs.observe_load(4)
    assert shared.asked() == constant


def test_a_burst_shows_what_levels_cost_and_gets_the_thresholds_of_its_beginning() -> None:
    deployment = Deployment("draft_model")
    chain = Proposal.of(TokenTree.chain([4, 5]), "draft_model")
    step = Step(chain, Acceptance((1, 2), 6), 0.3, 1.0)
    deployment.proposer.observe_native(
        [step, step._replace(proposal=Proposal.of(TREE, "draft_model+suffix"), draft_s=9)]
    )
    assert deployment.draft_costs.level_s["draft_model"] == pytest.approx((0.1, 1))
    deployment.proposer.observe_native([step._replace(draft_s=30.0)])
    assert deployment.draft_costs.level_s["draft_model"].value < 0.2, "one step that was held up counts little"
