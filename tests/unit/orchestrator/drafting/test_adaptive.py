"""Adaptive drafts: their size follows acceptance, the price of rows and the load, and never the drafted tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from auditor.reference.decoding import dense_q
from auditor.reference.rules import accept_rejection
from orchestrator.core.accept import accept_coupled
from orchestrator.core.context import Context
from orchestrator.core.cost_model import CostModel
from orchestrator.core.errors import RequestError
from orchestrator.core.proposal import Budget, Proposal, Proposer
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.step_costs import PLAIN, StepCosts
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, Distribution
from orchestrator.drafting import adaptive
from orchestrator.drafting.adaptive import Adaptive
from orchestrator.drafting.draft_costs import TRIAL_TIME_SHARE, DraftCosts
from orchestrator.drafting.estimates import MAX_UNIONS, OTHER_UNIONS, AcceptanceEstimates, range_of
from orchestrator.drafting.ledger import FIRST_PAUSE, MEASURED_STEPS, Meter
from orchestrator.drafting.ranks import RankEstimates, paying, paying_in_turn
from orchestrator.drafting.registry import ADAPTIVE_LEN, select_method
from tests.support.cost_models import cost_model_of
from tests.support.decode import dependencies
from tests.support.enumeration import Branch, law
from tests.support.replays import COSTS, FIXED, TEXTS, Clock, Guesses, adapted, costs_of, run


def lengths(
    alpha: float, cost: Callable[[float], float], draft_s: float = 0.02, others: int = 0, num_steps: int = 400
) -> tuple[list[int], int]:
    """Return the lengths of the drafts that are sent in the second half of the steps, and how often it was asked."""
    clock = Clock()
    guesses = Guesses(alpha, clock, draft_s)
    proposer, context = adapted(guesses, StepCosts(clock)), Context([0])
    sent: list[int] = []
    for _ in range(num_steps):
        tree = proposer.propose(context, Sampling(), Budget(32, 32)).tree
        sent.append(tree.num_nodes)
        clock.now_s += cost((tree.num_nodes + 1) * (1 + others))
        target_tokens = [len(context) + int(depth) for depth in tree.depths]
        acceptance = Acceptance(*accept_coupled(tree, target_tokens), num_in_pass=1 + others)
        context.commit(acceptance.tokens(tree))
        proposer.observe(tree, acceptance)
    return sent[num_steps // 2 :], guesses.num_calls


def test_drafts_are_longer_where_more_is_accepted_and_shorter_where_rows_cost_more() -> None:
    means = {(alpha, name): float(np.mean(lengths(alpha, COSTS[name])[0])) for alpha in (0.5, 0.9) for name in COSTS}
    for name in COSTS:
        assert means[0.9, name] >= means[0.5, name]
    assert means[0.9, "flat"] > means[0.9, "linear"] + 3


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.8, 0.9])
def test_gamma_is_that_of_the_formula(alpha: float) -> None:
    def gain(gamma: int) -> float:
        return (1 - alpha ** (gamma + 1)) / (1 - alpha) / (0.05 * gamma + 1.0 + 0.1 * gamma)

    best = max(range(17), key=gain)
    found = float(np.median(lengths(alpha, lambda rows: 0.9 + 0.1 * rows, draft_s=0.05, num_steps=800)[0]))
    assert abs(found - best) <= 1
    assert gain(round(found)) >= 0.98 * gain(best)


def test_nothing_is_drafted_under_load_and_the_proposer_is_hardly_asked() -> None:
    def loaded(rows: float) -> float:
        return 1.0 if rows <= 1 else rows / 8

    sent, num_calls = lengths(0.4, loaded, others=15)
    assert float(np.mean(sent)) < 0.2
    assert num_calls < 100


def test_the_size_of_a_draft_does_not_depend_on_its_tokens() -> None:
    sizes = []
    for shift in (0, 500):

        class Shifted(Guesses):
            def propose(self, context: Context, sampling: Sampling, budget: Budget, shift: int = shift) -> Proposal:
                tree = super().propose(context, sampling, budget).tree
                return Proposal.of(TokenTree(tree.tokens + np.int32(shift), tree.parents), self.name)

        clock = Clock()
        proposer, context, kept = adapted(Shifted(0.5, clock, 0.01), StepCosts(clock)), Context([0]), []
        for _ in range(100):
            tree = proposer.propose(context, Sampling(), Budget(32, 32)).tree
            kept.append(tree.num_nodes)
            clock.now_s += COSTS["linear"](tree.num_nodes + 1)
            context.commit([-1])
            proposer.observe(tree, Acceptance((), -1))
        sizes.append(kept)
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("method", FIXED[1:])
def test_adaptive_drafts_lose_little_where_the_method_loses_much(method: str, cost: str, text: str) -> None:
    texts = [TEXTS[text](800)]
    adaptive = run(method, texts, COSTS[cost], config='{"adaptive": true}')
    assert adaptive >= 0.97 * run("none", texts, COSTS[cost])


def test_whether_a_sampled_node_is_sent_does_not_depend_on_those_below_it() -> None:
    """Whether a node has children may follow from its token, and that token must not decide whether it is sent."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        probabilities = -np.sort(-rng.random(12))
        seconds = 1.0 + np.concatenate([[0.0], np.cumsum(rng.choice([0.0, 0.02, 0.6], 12))])
        model = CostModel(seconds, np.diff(seconds, append=seconds[-1]), 0.0, 1.0 / seconds[0])
        tree = TokenTree.chain(range(12))
        whole = paying_in_turn(tree, probabilities, model, 0.1)
        for fewer in range(12):
            found = paying_in_turn(TokenTree.chain(range(fewer)), probabilities[:fewer], model, 0.1)
            assert found.tolist() == whole[whole <= fewer].tolist()
    stairs, tree = CostModel(np.array([1.0, 1.8, 1.8, 1.8, 1.8]), np.zeros(5), 0.0, 1.0), TokenTree.chain(range(4))
    assert len(paying(np.full(4, 0.6), stairs, 0.0)) == 4
    assert len(paying_in_turn(tree, np.full(4, 0.6), stairs, 0.0)) == 0


def test_of_a_sampled_tree_a_node_goes_with_its_later_siblings_and_those_below_them() -> None:
    tree = TokenTree(np.arange(6, dtype=np.int32), np.array([0, 0, 0, 1, 2, 1], np.int32))
    costs = cost_model_of(1.0 + 0.3 * np.arange(129))
    assert paying_in_turn(tree, np.array([0.9, 0.1, 0.9, 0.8, 0.9, 0.2]), costs, 0.1).tolist() == [1, 4]


def test_trees_of_more_nodes_than_have_costs_are_cut_to_them() -> None:
    parents = np.arange(200, dtype=np.int32)
    nodes = paying(np.full(200, 0.9), cost_model_of(1.0 + 0.001 * np.arange(129)), 0.1)
    assert nodes.tolist() == list(range(1, 129)) and (parents[nodes - 1] < nodes).all()


P, Q = np.array([0.375, 0.5, 0.125]), np.array([0.25, 0.25, 0.5])
WHOLE = Distribution(np.arange(3, dtype=np.int32), Q.astype(np.float32))


class Branching(Proposer):
    """Samples two tokens below the root, and one more below the second of them if that is 0, else below the first.

    So does EAGLE-2's tree: whichever of two tokens is the likelier gets a child.
    """

    name = "branching"

    def __init__(self, branch: Branch) -> None:
        self._branch = branch

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        first = self._branch.choose(Q)
        second = self._branch.choose(np.where(np.arange(3) == first, 0.0, Q))
        tokens = np.array([first, second, self._branch.choose(Q)], np.int32)
        parents = np.array([0, 0, 1 if second else 2], np.int32)
        return Proposal(TokenTree(tokens, parents), (self.name,) * 3, (WHOLE,) * 3)


class Lengthy(Proposer):
    """Samples a chain of two tokens, and goes on after 1 for a long time."""

    name = "lengthy"

    def __init__(self, branch: Branch, clock: Clock) -> None:
        self._branch, self._clock = branch, clock

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        tokens = [self._branch.choose(Q), self._branch.choose(Q)]
        if tokens[-1] == 1:
            self._clock.now_s += 5.0
            tokens.append(self._branch.choose(Q))
        return Proposal(TokenTree.chain(tokens), (self.name,) * len(tokens), (WHOLE,) * len(tokens))


def emitted(proposer: Proposer, costs: StepCosts, branch: Branch) -> list[int]:
    """The first two tokens that come of one adaptive proposal, p being the same everywhere."""
    proposal = adapted(proposer, costs).propose(Context([0]), Sampling(1.0, rule=Rule.REJECTION), Budget(8, 3))
    tree = proposal.tree
    q = dense_q(tree, proposal.q, len(P))
    tokens = Acceptance(*accept_rejection(tree, np.tile(P, (tree.num_nodes + 1, 1)), q, 1, branch)).tokens(tree)
    return [*tokens, branch.choose(P), branch.choose(P)][:2]


@pytest.mark.parametrize("name", ["branching", "lengthy"])
def test_what_is_accepted_of_a_sampled_adaptive_draft_has_the_target_s_law(name: str) -> None:
    """Neither the node that a token lets another one have, nor the time that it takes, decides whether it is sent."""
    clock = Clock()
    costs = costs_of(clock, 1.0, 1.0, 1.1, 1.7) if name == "branching" else costs_of(clock, 1.0, 1.05, 1.65)

    def step(branch: Branch) -> tuple[int, ...]:
        proposer = Branching(branch) if name == "branching" else Lengthy(branch, clock)
        return tuple(emitted(proposer, costs, branch))

    assert law(step) == pytest.approx({(a, b): P[a] * P[b] for a in range(3) for b in range(3)}, abs=1e-7)


class Siblings(Proposer):
    """Samples the tokens 0 and 1 below the root."""

    name = "siblings"

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        tree = TokenTree(np.array([0, 1], np.int32), np.zeros(2, np.int32))
        return Proposal(tree, (self.name,) * 2, (WHOLE,) * 2)


def test_sampled_tokens_that_were_not_sent_are_not_judged_and_a_probe_is_sent_whole() -> None:
    """The token that comes without the draft is seldom a sampled one, which the rule would often have accepted."""
    clock, estimates, sampling = Clock(), AcceptanceEstimates(), Sampling(1.0, rule=Rule.REJECTION)
    proposer, sent = adapted(Siblings(), costs_of(clock, 1.0, 1.05, 3.0), estimates), list[int]()
    ranks = RankEstimates(estimates, "siblings", range_of(sampling), True)
    one_in = int(3.0 / TRIAL_TIME_SHARE)  # a probe takes as long as three plain steps
    for comes in (False, True):
        for _ in range(4 * one_in):
            tree = proposer.propose(Context([0]), sampling, Budget(8, 8)).tree
            sent.append(tree.num_nodes)
            proposer.observe(tree, Acceptance((1,), 2) if tree.num_nodes and comes else Acceptance((), 2))
        if not comes:
            assert set(sent[-one_in:]) == {0, 2} and sent[-one_in:].count(2) == 1
            assert ranks.probability(1, 0) < 0.35 and ranks.probability(1, 1) > 0.1
    assert sent[-1] == 1


def test_no_draft_is_sent_in_a_pause_though_it_has_begun_and_nothing_is_learnt_from_it() -> None:
    clock, estimates = Clock(), AcceptanceEstimates()
    costs, guesses = StepCosts(clock), Guesses(1.0, clock, 0.0)
    costs.observe_plain(1, 1.0)
    proposer, context, budget = adapted(guesses, costs, estimates), Context([0]), Budget(8, 8)
    proposer.observe(proposer.propose(context, Sampling(), budget).tree, Acceptance((), 5))
    ranks = RankEstimates(estimates, "guesses", 0, False)
    before = ranks.probability(1, 0)
    for _ in range(PLAIN):
        costs.observe(4, 1, 1, 1.0)
    proposer.begin(context, Sampling(), budget)
    assert proposer.propose(context, Sampling(), budget).tree.num_nodes == 0 and guesses.num_calls == 2
    assert proposer.num_plain == MEASURED_STEPS
    for _ in range(MEASURED_STEPS):
        proposer.observe(TokenTree.bare(), Acceptance((), 5))
    assert proposer.num_plain == 0 and ranks.probability(1, 0) == before
    assert proposer.propose(context, Sampling(), budget).tree.num_nodes


def test_requests_of_other_temperatures_and_rules_teach_each_other_nothing() -> None:
    clock, estimates = Clock(), AcceptanceEstimates()
    for _ in range(100):
        proposer = adapted(Guesses(0.0, clock, 0.0), costs_of(clock, 1.0, 1.01), estimates)
        tree = proposer.propose(Context([0]), Sampling(), Budget(8, 8)).tree
        proposer.observe(tree, Acceptance((), 5))
    for sampling, is_sent in (
        (Sampling(), False),
        (Sampling(1.0), True),
        (Sampling(0.2), True),
        (Sampling(1.0, rule=Rule.REJECTION), True),
    ):
        proposer = adapted(Guesses(0.0, clock, 0.0), costs_of(clock, 1.0, 1.3, 5.0), estimates)
        assert bool(proposer.propose(Context([0]), sampling, Budget(8, 8)).tree.num_nodes) == is_sent


def test_no_more_levels_are_weighed_than_the_method_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    weighed: list[int] = []
    monkeypatch.setattr(RankEstimates, "level_probability", lambda self, depth: weighed.append(depth) or 0.5)
    costs = costs_of(Clock(), 1.0)
    for method, config, num_levels in (
        ("suffix", {"draft_len": 5}, 5),
        ("prompt_lookup", {}, ADAPTIVE_LEN),
        ("prompt_lookup+suffix", {"suffix": {"draft_len": 7}}, 20),
        ("suffix", {"draft_len": 9, "max_nodes": 3}, 3),
    ):
        selected = select_method(method, json.dumps({"adaptive": True, **config}), frozenset(), {})
        selected.proposer(replace(dependencies(), step_costs=costs)).propose(
            Context([1, 2, 3]), Sampling(), Budget(128, 128)
        )
        assert max(weighed) == num_levels
        weighed.clear()


@pytest.mark.parametrize(
    ("method", "config", "num_levels"),
    [
        ("eagle2", {}, 10),
        ("eagle", {"choices": [[0, 0, 1]]}, 3),
        ("medusa", {}, 16),
        ("redrafter", {"beam_len": 4}, 4),
        ("draft_model", {"draft_len": 6}, 6),
    ],
)
def test_the_levels_of_a_drafter_are_those_of_its_parameters(
    method: str, config: dict[str, object], num_levels: int
) -> None:
    drafters = frozenset({"draft", "eagle", "medusa", "redrafter"})
    assert select_method(method, json.dumps(config), drafters, {}).config.num_levels == num_levels


@pytest.mark.parametrize("q", [False, True])
def test_a_sampled_draft_is_cut_in_turn_under_a_rule_that_reads_q(monkeypatch: pytest.MonkeyPatch, q: bool) -> None:
    tried: list[str] = []
    for name in ("paying", "paying_in_turn"):
        monkeypatch.setattr(adaptive, name, lambda *given, name=name: tried.append(name) or np.empty(0, np.int32))

    class Sampled(Proposer):
        name = "sampled"

        def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
            found = Distribution(np.array([3], np.int32), np.ones(1, np.float32))
            return Proposal(TokenTree.chain([3]), (self.name,), (found,) if q else ())

    clock = Clock()
    costs = StepCosts(clock)
    costs.observe_plain(1, 1.0)
    proposer = adapted(Sampled(), costs)
    for rule in (Rule.REJECTION, Rule.COUPLED):
        proposer.propose(Context([0]), Sampling(1.0, rule=rule), Budget(4, 4))
    assert tried == ["paying_in_turn" if q else "paying", "paying"]


@pytest.mark.parametrize("key", ["draft_len", "max_nodes"])
def test_auto_as_a_size_means_adaptive(key: str) -> None:
    selected = select_method("prompt_lookup", f'{{"{key}": "auto"}}', frozenset(), {})
    assert selected.config.adaptive
    again = select_method("prompt_lookup", selected.config_json, frozenset(), {})
    assert again.config == selected.config
    proposer = selected.proposer(replace(dependencies()))
    assert isinstance(proposer._proposer, Adaptive)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("method", "config", "message"),
    [
        ("lookahead", '{"max_nodes": "auto"}', "cannot be adaptive: it learns from the target's tokens"),
        ("prompt_lookup+suffix", '{"suffix": {"adaptive": true}}', "for all members"),
        ("prompt_lookup", '{"draft_len": "automatic"}', "draft_len must be"),
    ],
)
def test_what_cannot_be_adaptive_is_refused(method: str, config: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        select_method(method, config, frozenset(), {})


def test_the_wait_for_passes_of_others_is_not_the_cost_of_a_step() -> None:
    clock = Clock()
    costs = StepCosts(clock)
    costs.observe_plain(1, 1.0)
    meter = Meter(costs)
    for _ in range(20):
        meter.begin(1)
        meter.end(Proposal.empty())
        clock.now_s += 3.0
        meter.observe(TokenTree.bare(), Acceptance((), 1, queue_us=2_000_000))
    model = costs.cost_model()
    assert model
    assert model.seconds[0] == pytest.approx(1.0)


def test_a_pause_says_beforehand_how_many_steps_are_plain_and_they_may_run_together() -> None:
    clock = Clock()
    costs = StepCosts(clock)
    costs.observe_plain(1, 1.0)
    meter, drafted = Meter(costs), TokenTree.chain([1, 2, 3])
    for number in range(100):
        meter.begin(1)
        tree = drafted if number % 3 else TokenTree.bare()
        meter.end(Proposal.of(tree, ""))
        clock.now_s += 4.0 if number % 3 else 1.0
        meter.observe(tree, Acceptance((), 1))
        if meter.num_plain:
            break
    num_plain = meter.num_plain
    assert num_plain == FIRST_PAUSE
    assert meter.begin(1) is None
    meter.end(Proposal.empty())
    clock.now_s += 0.5 * num_plain
    for _ in range(num_plain):
        meter.observe(TokenTree.bare(), Acceptance((), 1))
    assert meter.num_plain == 0
    model = meter.begin(1)
    assert model
    assert 1.0 < model.rate_to_beat <= 2.0


@pytest.mark.parametrize("config", ['{"adaptive": true}', '{"draft_len": "auto"}'])
def test_a_method_s_defaults_share_what_the_deployment_knows(config: str) -> None:
    given = replace(dependencies(), step_costs=costs_of(Clock(), 1.0), draft_costs=DraftCosts())
    proposer = select_method("prompt_lookup", config, frozenset(), {}).proposer(given)
    proposer.propose(Context([1, 2, 3]), Sampling(), Budget(8, 8))
    assert given.draft_costs.by_kind
    own = replace(given, draft_costs=DraftCosts())
    select_method("prompt_lookup", '{"adaptive": true, "max_ngram": 2}', frozenset(), {}).proposer(own).propose(
        Context([1, 2, 3]), Sampling(), Budget(8, 8)
    )
    assert not own.draft_costs.by_kind


@pytest.mark.parametrize(
    ("method", "config", "adaptive"),
    [
        ("eagle2", "{}", "shared"),
        ("eagle2", '{"depth": 3}', "shared"),
        ("eagle2", '{"adaptive": false}', False),
        ("suffix+eagle2", "{}", "shared"),
        ("suffix+eagle2", '{"adaptive": false}', False),
        ("suffix+prompt_lookup", "{}", False),
        ("suffix", "{}", False),
    ],
)
def test_methods_with_a_drafter_adapt_where_passes_are_shared(method: str, config: str, adaptive: bool | str) -> None:
    assert select_method(method, config, frozenset({"eagle"}), {}).config.adaptive == adaptive
    with pytest.raises(RequestError, match="adaptive"):
        select_method("eagle2", '{"adaptive": "sometimes"}', frozenset({"eagle"}), {})


def test_what_is_learnt_of_unions_is_bounded() -> None:
    """A client can name thousands of unions, and what is learnt of each would stay in memory for ever."""
    given = replace(dependencies(), step_costs=costs_of(Clock(), 1.0, 1.01))
    names = [f"{first}+{second}" for first in "abcdefghijkl" for second in "ABCDEFGHIJKL"]
    for name in [*names, "single"]:
        guesses = Guesses(0.5, Clock(), 0.0)
        guesses.name = name
        proposer, context = Adaptive(guesses, given), Context([0])
        for _ in range(3):
            tree = proposer.propose(context, Sampling(), Budget(8, 8)).tree
            context.commit([-1])
            proposer.observe(tree, Acceptance((), -1))
    counted = {kind[0] for kind in given.estimates._counts}
    assert len(names) > len(counted) == MAX_UNIONS + 2 and {"single", OTHER_UNIONS} < counted
    assert {kind[0] for kind in given.draft_costs.by_kind} == counted


class Pairs(Proposer):
    """Drafts levels of two nodes after the text 0, 1, 2, …, of which one or the other is right, the first half as often."""

    name = "pairs"

    def __init__(self, clock: Clock) -> None:
        self._clock, self._rng = clock, np.random.default_rng(0)

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        depth = min(budget.max_depth, budget.max_nodes // 2, 4)
        self._clock.now_s += 0.6 * depth
        tokens, parents, last = list[int](), list[int](), 0
        for level in range(depth):
            right, wrong = len(context) + level, 10**6
            is_second = self._rng.random() < 0.5
            tokens += [wrong, right] if is_second else [right, wrong]
            parents += [last, last]
            last = len(tokens) - (not is_second)
        return Proposal.of(TokenTree(np.array(tokens, np.int32), np.array(parents, np.int32)), self.name)


def test_a_level_counts_with_all_its_nodes() -> None:
    """A level costs 0.6 plain steps: more than its first node brings, less than both together."""
    clock = Clock()
    costs = costs_of(clock, *(1.0 + 0.005 * row for row in range(10)))
    proposer, context, num_drafts = adapted(Pairs(clock), costs), Context([0]), 0
    for number in range(300):
        proposal = proposer.propose(context, Sampling(), Budget(8, 8))
        clock.now_s += 1.0
        tokens = [len(context) + int(depth) for depth in proposal.tree.depths]
        acceptance = Acceptance(*accept_coupled(proposal.tree, tokens))
        context.commit(acceptance.tokens(proposal.tree))
        proposer.observe(proposal.tree, acceptance)
        num_drafts += number >= 100 and bool(proposal.tree.num_nodes)
    assert num_drafts > 150
