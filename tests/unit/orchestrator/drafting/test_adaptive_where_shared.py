"""Drafts that adapt while other requests share the passes."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from orchestrator.core.context import Context
from orchestrator.core.proposal import Budget, Proposer, Step
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.step_costs import StepCosts
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, PassLoad
from orchestrator.drafting.adaptive import Adaptive
from orchestrator.drafting.adaptive_where_shared import AdaptiveWhereShared
from orchestrator.drafting.draft_costs import DraftCosts
from orchestrator.drafting.estimates import AcceptanceEstimates
from orchestrator.drafting.guarded import Guarded
from orchestrator.drafting.ranks import RankEstimates
from tests.support.decode import dependencies
from tests.support.replays import Clock, Guesses, adapted, costs_of

GREEDY = Sampling()


def where_shared(is_shared: bool = False) -> AdaptiveWhereShared:
    """A method that never pays, by default. is_shared: what is known of the passes before the first step."""
    clock = Clock()
    costs, guesses = costs_of(clock, 1.0, 1.5, 2.0), Guesses(0.0, clock, 0.1)
    costs.observe_load(16 if is_shared else 1)
    return AdaptiveWhereShared(guesses, adapted(guesses, costs), costs)


def sizes(
    proposer: Proposer,
    num_in_pass: int,
    sampling: Sampling = GREEDY,
    num_steps: int = 60,
    is_atypical: bool = False,
) -> list[int]:
    """The sizes of the next drafts; num_in_pass: requests of each pass."""
    load, found = PassLoad(num_in_pass, num_in_pass, 1.0, 1.0, is_atypical), list[int]()
    for _ in range(num_steps):
        tree = proposer.propose(Context([0]), sampling, Budget(4, 4)).tree
        found.append(tree.num_nodes)
        proposer.observe(tree, Acceptance((), 5, num_in_pass=num_in_pass, load=load))
    return found


def test_drafts_are_adapted_where_passes_are_shared_and_left_alone_elsewhere() -> None:
    assert sizes(where_shared(), 1) == [4] * 60
    for sampling in (Sampling(), Sampling(0.7), Sampling(rule=Rule.REJECTION)):
        assert sum(map(bool, sizes(where_shared(), 2, sampling)[20:])) <= 1


@pytest.mark.parametrize("sampling", [Sampling(0.7, rule=Rule.REJECTION), Sampling(0.7, rule=Rule.TYPICAL)])
def test_the_drafts_of_a_text_that_depends_on_them_do_not_depend_on_the_load(sampling: Sampling) -> None:
    assert sizes(where_shared(is_shared=True), 2, sampling) == [4] * 60


def test_drafts_are_left_alone_as_soon_as_a_request_is() -> None:
    proposer = where_shared()
    sizes(proposer, 2)
    while proposer.num_plain < 2:
        sizes(proposer, 2, num_steps=1)
    assert sizes(proposer, 1, num_steps=3) == [0, 4, 4]
    assert sum(map(bool, sizes(proposer, 2)[1:])) <= 1


def test_steps_of_a_burst_whose_request_became_alone_are_not_taken_for_single_ones() -> None:
    """Native code ran them together, so their time is that of all of them."""
    clock = Clock()
    costs, guesses = StepCosts(clock), Guesses(0.0, clock, 0.1)
    proposer = AdaptiveWhereShared(guesses, adapted(guesses, costs), costs)
    for _ in range(40):
        costs.observe_plain(2, 1.0)
    sizes(proposer, 2, num_steps=4)
    while proposer.num_plain < 4:
        clock.now_s += 1.0
        sizes(proposer, 2, num_steps=1)
    proposer.propose(Context([0]), GREEDY, Budget(4, 4))
    before, num_steps = costs.cost_model(), proposer.num_plain
    clock.now_s += num_steps
    for _ in range(num_steps):
        proposer.observe(TokenTree.bare(), Acceptance((), 5, num_in_pass=1))
    after = costs.cost_model()
    assert before and after and after.seconds[0] <= 1.1 * before.seconds[0]
    assert sizes(proposer, 1, num_steps=1) == [4]


def resting(num_in_pass: int) -> Guarded:
    """A request that rests, beside others or alone, as an engine sees it."""
    proposer = where_shared(is_shared=True)
    while proposer.num_plain < 10:
        sizes(proposer, 2, num_steps=1)
    proposer.propose(Context([0]), GREEDY, Budget(4, 4))
    proposer.observe(TokenTree.bare(), Acceptance((), 5, num_in_pass=num_in_pass))
    return Guarded(proposer, 10)


def test_a_rest_does_not_end_the_burst_of_others() -> None:
    """Alone, it ends after its last step, so that drafts begin again as soon as they may."""
    assert resting(2).max_plain == sys.maxsize > resting(2).num_plain
    assert 1 < resting(1).max_plain == resting(1).num_plain < 200


@pytest.mark.parametrize("num_left", (1, 10))
def test_a_rest_that_lasts_longer_than_planned_is_over_and_teaches_what_a_plain_step_costs(num_left: int) -> None:
    """num_left: steps of the rest that are left when the burst begins."""
    clock = Clock()
    costs, guesses = StepCosts(clock), Guesses(0.0, clock, 0.1)
    proposer, load = adapted(guesses, costs), PassLoad(2, 2, 1.0, 1.0)
    for _ in range(40):
        costs.observe_plain(2, 1.0)
    while proposer.num_plain != num_left:
        clock.now_s += 1.0
        sizes(proposer, 2, num_steps=1)
    empty, measured = proposer.propose(Context([0]), GREEDY, Budget(4, 4)), list[tuple[float, int]]()
    costs.observe_plain = lambda count, seconds, load, num: measured.append((seconds, num))  # type: ignore[assignment]
    num_steps, answer = num_left + 6, Acceptance((), 5, forward_us=10**6, num_in_pass=2, load=load)
    clock.now_s += num_steps
    proposer.observe_plain([Step(empty, answer, 0.0, 1.0)] * num_steps)
    assert proposer.num_plain == 0
    ((seconds, num_measured),) = measured
    assert seconds == pytest.approx(1.0, rel=0.05) and num_measured >= num_steps


def test_the_load_that_a_lone_request_shows_is_known_to_the_next_one() -> None:
    proposer = where_shared(is_shared=True)
    sizes(proposer, 1)
    assert not proposer._costs.shares_passes


def test_a_rest_that_many_requests_asked_for_ends_when_they_do() -> None:
    clock = Clock()
    guesses = Guesses(0.0, clock, 0.1)
    proposer = adapted(guesses, costs_of(clock, 1.0, 1.5, 2.0))
    sizes(proposer, 16)
    while proposer.num_plain < 100:
        sizes(proposer, 16, num_steps=1)
    sizes(proposer, 1, num_steps=1)
    proposer.begin(Context([0]), GREEDY, Budget(4, 4))
    assert proposer.num_plain == 0


def test_a_pass_that_reads_prompts_does_not_say_that_a_request_is_alone() -> None:
    proposer = where_shared(is_shared=True)
    sizes(proposer, 2)
    assert sum(map(bool, sizes(proposer, 1, num_steps=20, is_atypical=True))) <= 1


def test_before_its_first_step_a_request_makes_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head has no hidden states then, so that nothing would be learnt."""
    clock, estimates = Clock(), AcceptanceEstimates()
    ranks = RankEstimates(estimates, "guesses", 0, False)
    for _ in range(200):
        ranks.learn(TokenTree.chain([7]), [1])
    given = replace(dependencies(), step_costs=costs_of(clock, 1.0, 1.5), estimates=estimates, draft_costs=DraftCosts())
    given.draft_costs.levels("guesses", 0, False).idle_s = 1e6
    guesses = Guesses(0.0, clock, 0.1)
    first, other = Adaptive(guesses, given), Adaptive(guesses, given)
    assert [sizes(each, 2, num_steps=1) for each in (first, other)] == [[0], [0]]
    assert guesses.num_calls == 0
    assert [bool(sizes(each, 2, num_steps=1)[0]) or guesses.num_calls for each in (first, other)] == [1, 1]


def in_bursts(together: bool) -> tuple[list[int], list[int], list[float]]:
    """The sizes of drafts, the lengths of pauses, and the costs learnt, if up to five plain steps share a burst.

    together: the steps of a burst are observed in one call.
    """
    clock = Clock()
    costs, guesses = costs_of(clock, 1.0, 1.5, 2.0), Guesses(0.3, clock, 0.1)
    proposer, load, context = adapted(guesses, costs), PassLoad(2, 2, 1.0, 1.0), Context([0])
    found, pauses = list[int](), list[int]()
    for _ in range(200):
        proposal = proposer.propose(context, GREEDY, Budget(4, 4))
        num_steps = max(min(proposer.num_plain, 5), 1)
        found.append(proposal.tree.num_nodes)
        pauses.append(proposer.num_plain)
        clock.now_s += num_steps * 1.1
        answer = Acceptance((), 5, queue_us=1000, forward_us=10**6, num_in_pass=2, load=load)
        steps = [Step(proposal, answer, 0.0, 1.0)] * num_steps
        for _ in steps:
            context.commit([5])
        if together and proposer.num_plain:
            proposer.observe_plain(steps)
        else:
            for step in steps:
                proposer.observe(step.proposal.tree, step.acceptance)
    model = costs.cost_model()
    assert model
    return found, pauses, [model.rate_to_beat, *model.seconds]


def test_the_plain_steps_of_a_burst_teach_the_same_whether_they_are_observed_together_or_one_by_one() -> None:
    together, one_by_one = in_bursts(True), in_bursts(False)
    assert together == one_by_one
    assert max(together[1]) > 5  # pauses are longer than a burst
    assert any(together[0])  # drafts go on between the pauses
