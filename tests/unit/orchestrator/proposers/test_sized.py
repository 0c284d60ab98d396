"""Adaptive drafts: their size follows acceptance, the price of rows and the load, and never the drafted tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from orchestrator.core.context import Context
from orchestrator.core.errors import RequestError
from orchestrator.core.proposal import Budget, Proposal, Proposer
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.step_costs import StepCosts, Surface
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, Distribution
from orchestrator.proposers import sized
from orchestrator.proposers.estimates import AcceptanceEstimates
from orchestrator.proposers.ledger import FIRST_PAUSE, Meter
from orchestrator.proposers.ranks import paying, paying_in_turn
from orchestrator.proposers.registry import select_method
from orchestrator.proposers.sized import PROBE, Sized
from orchestrator.sampling.accept import accept_coupled
from tests.support.decode import dependencies
from tests.unit.orchestrator.proposers.test_auto import FIXED, SURFACES, TEXTS, Clock, run


class Guesses(Proposer):
    """Drafts the next tokens of the text 0, 1, 2, …, each right with probability alpha; a token takes draft_s."""

    name = "guesses"

    def __init__(self, alpha: float, clock: Clock, draft_s: float) -> None:
        self._alpha, self._clock, self._draft_s, self.num_calls = alpha, clock, draft_s, 0
        self._rng = np.random.default_rng(0)

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        length = budget.clipped(16)
        self.num_calls += bool(length)
        self._clock.now_s += self._draft_s * length
        right = self._rng.random(length) < self._alpha
        tokens = [len(context) + i if right[i] else 10**6 for i in range(length)]
        return Proposal.chain(tokens, self.name)


def lengths(
    alpha: float, surface: Callable[[float], float], draft_s: float = 0.02, others: int = 0, num_steps: int = 400
) -> tuple[list[int], int]:
    """Return the lengths of the drafts that are sent in the second half of the steps, and how often it was asked."""
    clock = Clock()
    guesses = Guesses(alpha, clock, draft_s)
    sized, context = Sized(guesses, StepCosts(clock), AcceptanceEstimates()), Context([0])
    sent: list[int] = []
    for _ in range(num_steps):
        tree = sized.propose(context, Sampling(), Budget(32, 32)).tree
        sent.append(tree.num_nodes)
        clock.now_s += surface((tree.num_nodes + 1) * (1 + others))
        target_tokens = [len(context) + int(depth) for depth in tree.depths]
        acceptance = Acceptance(*accept_coupled(tree, target_tokens), num_in_pass=1 + others)
        context.commit(acceptance.tokens(tree))
        sized.observe(tree, acceptance)
    return sent[num_steps // 2 :], guesses.num_calls


def test_drafts_are_longer_where_more_is_accepted_and_shorter_where_rows_cost_more() -> None:
    means = {
        (alpha, name): float(np.mean(lengths(alpha, SURFACES[name])[0])) for alpha in (0.5, 0.9) for name in SURFACES
    }
    for name in SURFACES:
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
    assert num_calls < 400 / PROBE + 100


def test_the_size_of_a_draft_does_not_depend_on_its_tokens() -> None:
    sizes = []
    for shift in (0, 500):

        class Shifted(Guesses):
            def propose(self, context: Context, sampling: Sampling, budget: Budget, shift: int = shift) -> Proposal:
                tree = super().propose(context, sampling, budget).tree
                return Proposal.of(TokenTree(tree.tokens + np.int32(shift), tree.parents), self.name)

        clock = Clock()
        sized, context, kept = (
            Sized(Shifted(0.5, clock, 0.01), StepCosts(clock), AcceptanceEstimates()),
            Context([0]),
            [],
        )
        for _ in range(100):
            tree = sized.propose(context, Sampling(), Budget(32, 32)).tree
            kept.append(tree.num_nodes)
            clock.now_s += SURFACES["linear"](tree.num_nodes + 1)
            context.commit([-1])
            sized.observe(tree, Acceptance((), -1))
        sizes.append(kept)
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("method", FIXED[1:])
def test_adaptive_drafts_lose_little_where_the_method_loses_much(method: str, surface: str, text: str) -> None:
    texts = [TEXTS[text](800)]
    adaptive = run(method, texts, SURFACES[surface], config='{"adaptive": true}')
    assert adaptive >= 0.97 * run("none", texts, SURFACES[surface])


def test_whether_a_sampled_node_is_sent_does_not_depend_on_those_below_it() -> None:
    """Whether a node has children may follow from its token, and that token must not decide whether it is sent."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        chances = -np.sort(-rng.random(12))
        seconds = 1.0 + np.concatenate([[0.0], np.cumsum(rng.choice([0.0, 0.02, 0.6], 12))])
        surface = Surface(seconds, np.diff(seconds, append=seconds[-1]), 0.0, 1.0 / seconds[0])
        whole = paying_in_turn(chances, surface, 0.1)
        for fewer in range(12):
            assert paying_in_turn(chances[:fewer], surface, 0.1).tolist() == whole[whole <= fewer].tolist()
    stairs = Surface(np.array([1.0, 1.8, 1.8, 1.8, 1.8]), np.zeros(5), 0.0, 1.0)
    assert len(paying(np.full(4, 0.6), stairs, 0.0)) == 4 and len(paying_in_turn(np.full(4, 0.6), stairs, 0.0)) == 0


@pytest.mark.parametrize("q", [False, True])
def test_a_sampled_draft_is_cut_in_turn_under_a_rule_that_reads_q(monkeypatch: pytest.MonkeyPatch, q: bool) -> None:
    tried: list[str] = []
    for name in ("paying", "paying_in_turn"):
        monkeypatch.setattr(sized, name, lambda chances, *rest, name=name: tried.append(name) or np.empty(0, np.int32))

    class Sampled(Proposer):
        name = "sampled"

        def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
            found = Distribution(np.array([3], np.int32), np.ones(1, np.float32))
            return Proposal(TokenTree.chain([3]), (self.name,), (found,) if q else ())

    clock = Clock()
    costs = StepCosts(clock)
    costs.observe_plain(1, 1.0)
    proposer = Sized(Sampled(), costs, AcceptanceEstimates())
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
    assert isinstance(proposer._proposer, Sized)  # type: ignore[attr-defined]


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
        meter.begin()
        meter.sent(Proposal.empty())
        clock.now_s += 3.0
        meter.answered(TokenTree.bare(), Acceptance((), 1, queue_us=2_000_000))
    surface = costs.surface()
    assert surface
    assert surface.seconds[0] == pytest.approx(1.0)


def test_a_pause_says_beforehand_how_many_steps_are_plain_and_they_may_be_made_together() -> None:
    clock = Clock()
    costs = StepCosts(clock)
    costs.observe_plain(1, 1.0)
    meter, drafted = Meter(costs), TokenTree.chain([1, 2, 3])
    for number in range(100):
        meter.begin()
        tree = drafted if number % 3 else TokenTree.bare()
        meter.sent(Proposal.of(tree, ""))
        clock.now_s += 4.0 if number % 3 else 1.0
        meter.answered(tree, Acceptance((), 1))
        if meter.num_plain:
            break
    num_plain = meter.num_plain
    assert num_plain == FIRST_PAUSE
    assert meter.begin() is None
    meter.sent(Proposal.empty())
    clock.now_s += 0.5 * num_plain
    for _ in range(num_plain):
        meter.answered(TokenTree.bare(), Acceptance((), 1))
    assert meter.num_plain == 0
    surface = meter.begin()
    assert surface
    assert 1.0 < surface.rate <= 2.0
