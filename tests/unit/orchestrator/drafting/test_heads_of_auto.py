"""`auto` with a drafter on texts that are known beforehand: it uses it where it pays, and loses nothing elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from orchestrator.core.context import Context
from orchestrator.core.proposal import Budget, Proposal
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.step_costs import StepCosts
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import NO_HEAD_INPUT, Acceptance, DraftResponse, HeadInput
from orchestrator.drafting.dependencies import DrafterClient, ProposerDependencies
from orchestrator.drafting.draft_costs import TRIAL_TIME_SHARE, DraftCosts
from orchestrator.drafting.estimates import AcceptanceEstimates
from orchestrator.drafting.guarded import Guarded
from orchestrator.drafting.heads_of_auto import HeadsOfAuto
from orchestrator.drafting.none import NoProposer
from orchestrator.drafting.ranks import RankEstimates, paying
from orchestrator.drafting.registry import select_method
from orchestrator.drafting.union import united
from tests.support.cost_models import cost_model_of
from tests.support.decode import dependencies
from tests.support.replays import COSTS, VOCAB, Clock, generate, novel, repetitive

#: Costs by which a chain of five tokens that mostly come is worth its rows.
CHEAP_ROWS = ("flat", "stairs")


@dataclass
class KnowingClient(DrafterClient):
    """A draft model that knows the text but for some of its tokens, and takes its time.

    skill: how often a token is right. took_s: of a draft.
    """

    clock: Clock
    text: Sequence[int]
    skill: float
    took_s: float
    num_calls: int = 0
    has_given_up: bool = False
    use: None = None

    def begin(self, context: Context, sampling: Sampling, budget: Budget, head: HeadInput = NO_HEAD_INPUT) -> None:
        return

    def propose(
        self, context: Context, sampling: Sampling, budget: Budget, head: HeadInput = NO_HEAD_INPUT
    ) -> DraftResponse:
        self.num_calls += 1
        self.clock.now_s += self.took_s
        at = len(context)
        right = np.random.default_rng(at).random(budget.max_nodes) < self.skill
        ids = self.text[at : at + budget.max_nodes]
        return DraftResponse(
            TokenTree.chain([token if is_right else VOCAB + 1 for token, is_right in zip(ids, right, strict=False)])
        )

    def close(self) -> None:
        return


def rate_of(
    method: str, texts: Iterable[Sequence[int]], cost: str, skill: float, took_s: float = 0.3
) -> tuple[float, int]:
    """Generate texts one after the other; return tokens per plain pass, and the calls of the draft model."""
    clock = Clock()
    shared = replace(dependencies(), step_costs=StepCosts(clock), drafters=frozenset({"draft"}))
    tokens = calls = 0
    for ids in texts:
        client = KnowingClient(clock, ids, skill, took_s)
        given: ProposerDependencies = replace(shared, drafter_client=lambda name, client=client: client)
        proposer = select_method(method, "", frozenset({"draft"}), {}).proposer(given)
        tokens += len(ids) - generate(proposer, ids, clock, COSTS[cost], 0)
        calls += client.num_calls
    return tokens / clock.now_s * COSTS[cost](1), calls


@pytest.mark.parametrize("cost", CHEAP_ROWS)
def test_auto_uses_a_drafter_where_nothing_else_drafts(cost: str) -> None:
    texts = [novel(1500)[start:] for start in range(4)]
    alone, _ = rate_of("draft_model", texts, cost, 0.8)
    found, _ = rate_of("auto", texts, cost, 0.8)
    assert found >= 0.9 * alone > 1.5


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize(("skill", "took_s"), [(0.0, 0.3), (0.8, 4.0), (0.2, 0.5)])
def test_a_drafter_that_does_not_pay_costs_next_to_nothing(cost: str, skill: float, took_s: float) -> None:
    texts = [novel(1500)[start:] for start in range(4)]
    found, calls = rate_of("auto", texts, cost, skill, took_s)
    assert calls > 0
    assert found >= 0.98


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("skill", [0.0, 0.3])
def test_a_drafter_that_does_not_pay_takes_nothing_from_the_other_sources(cost: str, skill: float) -> None:
    texts = [repetitive(1500)] * 2
    without = dependencies_rate(texts, cost)
    found, _ = rate_of("auto", texts, cost, skill)
    assert found >= 0.97 * without


def dependencies_rate(texts: Sequence[Sequence[int]], cost: str) -> float:
    """Return the rate of `auto` without any drafter."""
    clock, tokens = Clock(), 0
    shared = replace(dependencies(), step_costs=StepCosts(clock))
    for ids in texts:
        proposer = select_method("auto", "", frozenset(), {}).proposer(shared)
        tokens += len(ids) - generate(proposer, ids, clock, COSTS[cost], 0)
    return tokens / clock.now_s * COSTS[cost](1)


@pytest.mark.parametrize("cost", CHEAP_ROWS)
def test_auto_beats_the_drafter_and_the_other_sources_where_each_has_its_part(cost: str) -> None:
    texts = [part for number in range(4) for part in (novel(900)[number:], repetitive(900 + number))]
    drafter, _ = rate_of("draft_model", texts, cost, 0.8)
    found, _ = rate_of("auto", texts, cost, 0.8)
    assert found > max(drafter, dependencies_rate(texts, cost))


def test_a_drafter_is_left_alone_where_it_would_keep_others_from_steps_in_native_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StepCosts, "breaks_others", True)
    _, calls = rate_of("auto", [novel(1500)], "flat", 0.8)
    assert calls == 0


@pytest.mark.parametrize(
    ("num_in_pass", "is_burst", "expected"), [(1, True, False), (2, False, False), (2, True, True)]
)
def test_what_needs_python_breaks_others_where_they_share_native_steps(
    num_in_pass: int, is_burst: bool, expected: bool
) -> None:
    costs = StepCosts()
    costs.observe(1, num_in_pass, 1, 1.0)
    if is_burst:
        costs.observe_native(2, num_in_pass, 1, 1.0, None)
    assert costs.breaks_others is expected


def test_a_trial_costs_all_requests_of_its_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    for num_in_pass in (1, 4):
        costs = DraftCosts(elapsed_s=1e6)
        given = replace(dependencies(), draft_costs=costs, drafters=frozenset({"draft"}))
        heads = HeadsOfAuto(replace(given, build=lambda name: Guarded(NoProposer(), 10)))
        heads.choose(1.0, 100, cost_model_of(np.ones(9)), 0)
        heads.observe(TokenTree.bare(), Acceptance((), 1, num_in_pass=num_in_pass), 2.0)
        tried.append(costs.tried_s)
    assert tried == [2.0, 8.0]


def test_trials_take_no_more_than_their_part_of_the_time() -> None:
    costs = DraftCosts(elapsed_s=100.0, tried_s=100.0 * TRIAL_TIME_SHARE - 0.1)
    assert costs.may_try
    costs.tried_s += 0.2
    assert not costs.may_try


def test_a_united_tree_holds_both_and_no_path_is_likelier_than_the_one_to_its_parent() -> None:
    grown = Proposal.chain([1, 2], "suffix")
    drafted = Proposal.of(TokenTree(np.array([1, 3, 5, 4], np.int32), np.array([0, 0, 1, 2], np.int32)), "eagle2")
    proposal, probabilities = united(grown, np.array([0.6, 0.3]), drafted, [0.9, 0.5, 0.5, 0.8])
    assert proposal.tree.paths[1:] == [(1,), (1, 2), (3,), (1, 5), (3, 4)]
    assert proposal.sources == ("suffix+eagle2", "suffix", "eagle2", "eagle2", "eagle2")
    assert probabilities.tolist() == pytest.approx([0.9, 0.3, 0.5 * 0.4, 0.9 * 0.5 * 0.5, 0.5 * 0.4 * 0.8])
    above = [1.0, *probabilities]
    assert all(probabilities[node] <= above[parent] for node, parent in enumerate(proposal.tree.parents))


def test_what_is_sent_is_a_tree_whatever_the_probabilities() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        parents = np.array([int(rng.integers(0, node + 1)) for node in range(12)], np.int32)
        probabilities = [1.0]
        for parent in parents.tolist():
            probabilities.append(probabilities[parent] * float(rng.choice([0.2, 0.9, 1.0])))
        tree = TokenTree(np.arange(12, dtype=np.int32), parents)
        nodes = paying(np.array(probabilities[1:]), cost_model_of(1.0 + 0.2 * np.arange(129)), 0.5)
        kept = {0, *nodes.tolist()}
        assert all(int(tree.parents[node - 1]) in kept for node in nodes)


def test_ranks_learn_on_the_way_of_the_text_and_say_how_far_it_goes() -> None:
    tree = TokenTree(np.array([1, 2, 3], np.int32), np.array([0, 0, 1], np.int32))
    ranks = RankEstimates(AcceptanceEstimates(), "eagle2", 0)
    for _ in range(200):
        assert ranks.learn(tree, [1, 9]) == 1
    assert ranks.probabilities(tree) == pytest.approx([1.0, 0.0, 0.0], abs=0.05)
