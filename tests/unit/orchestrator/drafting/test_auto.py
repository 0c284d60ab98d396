"""`auto` on texts that are known beforehand, with a target whose passes cost what a formula says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from native.drafts import GrowthBinding
from orchestrator.core.context import Context
from orchestrator.core.proposal import Budget, Proposal
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.step_costs import StepCosts
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance
from orchestrator.drafting.candidates import Candidate
from orchestrator.drafting.estimates import AcceptanceEstimates, RequestOdds, corrected, range_of
from orchestrator.drafting.growth import Growth
from orchestrator.drafting.joint_growth import MARGIN
from orchestrator.drafting.registry import select_method
from tests.support.cost_models import cost_model_of
from tests.support.decode import dependencies
from tests.support.replays import COSTS, FIXED, TEXTS, Clock, generate, rates, repetitive, run, trap


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("text", ["novel", "trap"])
def test_auto_is_never_slower_than_plain_where_nothing_can_be_drafted(cost: str, text: str) -> None:
    texts = [TEXTS[text](1500)]
    assert run("auto", texts, COSTS[cost]) >= 0.98 * run("none", texts, COSTS[cost])


@pytest.mark.parametrize("cost", COSTS)
def test_auto_is_as_fast_as_the_best_fixed_method_on_a_text_that_stays_the_same(cost: str) -> None:
    texts = [repetitive(1500)]
    best = max(run(method, texts, COSTS[cost]) for method in FIXED)
    assert run("auto", texts, COSTS[cost]) >= best


@pytest.mark.parametrize("cost", COSTS)
def test_auto_beats_every_fixed_method_when_the_text_switches(cost: str) -> None:
    texts = [part for seed in range(3) for part in (trap(600), repetitive(900 + seed))]
    best = max(run(method, texts, COSTS[cost]) for method in FIXED)
    assert run("auto", texts, COSTS[cost]) > best


@pytest.mark.parametrize("cost", COSTS)
def test_auto_beats_every_fixed_method_when_the_load_switches_and_no_text_costs_the_batch_much(cost: str) -> None:
    """The geometric mean of the batch's rates, since a faster method would count the texts under load for less."""
    texts = [(repetitive(600 + seed), trap(400), repetitive(601 + seed), trap(400)) for seed in range(2)]
    parts = [part for four in texts for part in zip(four, (0, 12, 12, 0), strict=True)]
    found = {method: np.array(rates(method, parts, COSTS[cost])) for method in (*FIXED, "auto")}
    means = {method: np.log(each).mean() for method, each in found.items()}
    assert means["auto"] > max(means[method] for method in FIXED)
    assert (found["auto"] >= 0.95 * found["none"]).all()


def test_auto_sends_fewer_nodes_where_rows_cost_more() -> None:
    def mean_nodes(cost: str) -> float:
        clock = Clock()
        proposer = select_method("auto", "", frozenset(), {}).proposer(
            replace(dependencies(), step_costs=StepCosts(clock))
        )
        seen = []
        propose = proposer.propose

        def counted(context: Context, sampling: Sampling, budget: Budget) -> Proposal:
            proposal = propose(context, sampling, budget)
            seen.append(proposal.tree.num_nodes)
            return proposal

        proposer.propose = counted  # type: ignore[method-assign]
        generate(proposer, repetitive(1500), clock, COSTS[cost], 0)
        return float(np.mean(seen))

    assert mean_nodes("linear") < 0.7 * mean_nodes("flat")


class Drawn:
    """A source whose candidates after every continuation, and their probabilities, are drawn from a seed."""

    name = "drawn"

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def start(self, context: Context) -> tuple[int, ...]:
        return ()

    def after(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*state, token)

    def candidates(self, state: tuple[int, ...]) -> list[Candidate]:
        rng = np.random.default_rng((self._seed, *state))
        return [Candidate(token, int(rng.integers(1000))) for token in range(1, 3) if rng.random() < 0.8]

    def prior(self, evidence: int) -> float:
        return evidence / 1000


def continuations(source: Drawn, depth: int) -> list[tuple[tuple[int, ...], float]]:
    """All continuations that the source names, of at most `depth` tokens, with their probabilities."""
    found, level = [], [((), 1.0)]
    for _ in range(depth):
        level = [
            ((*path, candidate.token), probability * min(source.prior(candidate.evidence), 0.99))
            for path, probability in level
            for candidate in source.candidates(path)
        ]
        found += level
    return found


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("seed", range(25))
def test_no_tree_of_the_candidates_has_a_higher_rate(cost: str, seed: int) -> None:
    others, seconds = 0.1 * seed, np.array([COSTS[cost](rows) for rows in range(1, 130)])
    costs = cost_model_of(seconds, others)
    source = Drawn(seed)
    tree = Growth([source], AcceptanceEstimates()).grow(Context([1]), Budget(128, 6), costs).tree

    probabilities = dict(continuations(source, 6))
    best = sorted(probabilities.values(), reverse=True)
    rates = [(1 + others + sum(best[:n])) / seconds[n] for n in range(1, len(best) + 1)]
    plain = (1 + MARGIN) * (1 + others) / seconds[0]
    found = (1 + others + sum(probabilities[path] for path in tree.paths[1:])) / seconds[tree.num_nodes]
    assert bool(tree.num_nodes) == (max(rates, default=0.0) > plain)
    assert not tree.num_nodes or found == pytest.approx(max(rates, default=0.0))


def test_growth_keeps_to_the_budget_and_grows_chains_where_a_rule_needs_them() -> None:
    costs = cost_model_of(1.0 + 0.001 * np.arange(129))
    for seed, (max_nodes, max_depth) in enumerate([(0, 5), (5, 0), (3, 9), (40, 2)] * 5):
        budget = Budget(max_nodes, max_depth)
        tree = Growth([Drawn(seed)], AcceptanceEstimates()).grow(Context([1]), budget, costs).tree
        assert tree.num_nodes <= max_nodes
        assert tree.depths.max() <= max_depth
        assert (
            Growth([Drawn(seed)], AcceptanceEstimates(), is_chain=True).grow(Context([1]), budget, costs).tree.is_chain
        )


class Named(Drawn):
    """A source that names the same candidates after every continuation."""

    def __init__(self, candidates: list[Candidate]) -> None:
        super().__init__(0)
        self._candidates = candidates

    def candidates(self, state: tuple[int, ...]) -> list[Candidate]:
        return self._candidates


def test_candidates_are_judged_by_the_text_whether_they_were_sent_or_not() -> None:
    estimates = AcceptanceEstimates()
    growth = Growth([Named([Candidate(1, 900), Candidate(2, 10)])], estimates)
    for number in range(20):
        tree = growth.grow(Context([1]), Budget(8, 8), cost_model_of(1.0 + 0.5 * np.arange(129))).tree
        assert number or 2 not in tree.tokens
        growth.learn([2])
    assert estimates.probability(("drawn", 900, 0, 0), 0.9) < 0.2
    assert estimates.probability(("drawn", 10, 0, 0), 0.01) > 0.8


def test_the_text_of_plain_steps_is_compared_with_what_would_have_been_named() -> None:
    estimates, costs = AcceptanceEstimates(), cost_model_of(1.0 + 0.5 * np.arange(129))
    growth, context = Growth([Named([Candidate(1, 900)])], estimates), Context([1])
    growth.grow(context, Budget(8, 8), costs)
    growth.learn([2])
    context.commit([2] * 60)
    growth.grow(context, Budget(8, 8), costs)
    assert estimates.probability(("drawn", 900, 0, 0), 0.9) == pytest.approx(0.9 * 4 / 64, rel=0.1)


def test_estimates_follow_the_newest_outcomes() -> None:
    estimates = AcceptanceEstimates()
    assert estimates.probability("kind", 0.3) == pytest.approx(0.3)
    for _ in range(2000):
        estimates.observe("kind", True)
    assert estimates.probability("kind", 0.3) > 0.9
    for _ in range(2000):
        estimates.observe("kind", False)
    assert estimates.probability("kind", 0.3) < 0.1


def test_a_requests_odds_correct_what_the_deployment_expects() -> None:
    better, worse, same = RequestOdds(), RequestOdds(), RequestOdds()
    for number in range(40):
        better.observe(0.5, True)
        worse.observe(0.5, False)
        same.observe(0.5, number % 2 == 0)
    assert corrected(0.5, better.ratio) > 0.85
    assert corrected(0.5, worse.ratio) < 0.15
    assert corrected(0.5, same.ratio) == pytest.approx(0.5, abs=0.05)
    assert corrected(0.9, 1.0) == pytest.approx(0.9)


def test_greedy_and_sampled_requests_teach_each_other_nothing() -> None:
    ranges = [range_of(Sampling(temperature)) for temperature in (0.0, 0.2, 0.5, 0.8, 1.0, 1.5, 9.0)]
    assert ranges == [0, 1, 2, 3, 3, 4, 4]
    estimates, costs = AcceptanceEstimates(), cost_model_of(1.0 + 0.5 * np.arange(129))
    for _ in range(50):
        growth = Growth([Named([Candidate(1, 900)])], estimates)
        growth.grow(Context([1]), Budget(8, 1), costs, 3)
        growth.learn([2])
    for temperature_range, num_nodes in ((3, 0), (0, 1)):
        growth = Growth([Named([Candidate(1, 900)])], estimates)
        assert growth.grow(Context([1]), Budget(8, 1), costs, temperature_range).tree.num_nodes == num_nodes


def test_the_prompt_is_read_before_the_first_step_though_no_cost_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later proposals are made on the engine's thread, where a long prompt would use up the proposer's time limit."""
    read: list[list[int]] = []
    monkeypatch.setattr(GrowthBinding, "read_prompt", lambda _, tokens: read.append([*tokens]))
    given = replace(dependencies(), step_costs=StepCosts(Clock()), estimates=AcceptanceEstimates())
    proposer, context = select_method("auto", "", frozenset(), {}).proposer(given), Context([*range(50)])
    for _ in range(3):
        assert proposer.propose(context, Sampling(), Budget(8, 8)).tree.num_nodes == 0
        context.commit([7])
        proposer.observe(TokenTree.bare(), Acceptance((), 7))
    assert read == [[*range(50)]]
