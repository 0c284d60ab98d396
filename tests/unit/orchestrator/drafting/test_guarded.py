"""A proposer that raises, or proposes what breaks a law, costs the drafts and never the text."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from auditor.reference.decoding import dense_q, generate
from auditor.reference.rules import accept_block, accept_rejection
from orchestrator.core.arrays import FloatArray
from orchestrator.core.context import Context
from orchestrator.core.drafting import Limits
from orchestrator.core.errors import EngineError
from orchestrator.core.proposal import Budget, Proposal, Proposer, Step
from orchestrator.core.sampled_drafts import nodes_with_valid_q
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, Distribution, StepOptions
from orchestrator.drafting.guarded import Guarded
from tests.support.decode import decode, observe
from tests.support.enumeration import Branch, law
from tests.support.table_target import TableTarget

VOCAB_SIZE = 10
BUDGET = Budget(4, 3)
TREES = {
    "an id beyond the vocabulary": TokenTree.chain([1, VOCAB_SIZE]),
    "a negative id": TokenTree.chain([-1]),
    "twins": TokenTree(np.array([1, 1], np.int32), np.array([0, 0], np.int32)),
}


@dataclass
class Faulty:
    """Proposes one tree, or raises where it is told to."""

    tree: TokenTree = field(default_factory=lambda: TokenTree.chain([1, 2]))
    raises_in: str = ""
    name: str = "faulty"
    calls: list[str] = field(default_factory=list)

    @property
    def needs(self) -> StepOptions:
        if self.raises_in == "needs":
            raise ValueError("on purpose")
        return StepOptions(target_tokens=True)

    def _called(self, what: str) -> None:
        self.calls.append(what)
        if what == self.raises_in:
            raise ValueError("on purpose")

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        self._called("propose")
        return Proposal.of(self.tree, self.name)

    def observe(self, steps: Sequence[Step]) -> None:
        self._called("observe")

    def close(self) -> None:
        self._called("close")


def steps(proposer: Guarded, count: int = 3) -> list[list[int]]:
    """Run steps and return what was proposed in each."""
    found = []
    for _ in range(count):
        tree = proposer.propose(Context([3]), Sampling(), BUDGET).tree
        observe(proposer, tree, Acceptance((), 5))
        found.append(tree.tokens.tolist())
    return found


def test_sound_proposer_is_let_through() -> None:
    inner = Faulty()
    guarded = Guarded(inner, VOCAB_SIZE)
    assert (guarded.name, guarded.needs) == ("faulty", StepOptions(target_tokens=True))
    assert steps(guarded) == [[1, 2]] * 3
    guarded.close()
    assert inner.calls == ["propose", "observe"] * 3 + ["close"]


@pytest.mark.parametrize("where", ["propose", "observe"])
def test_proposer_that_raises_is_asked_no_more(where: str, caplog: pytest.LogCaptureFixture) -> None:
    inner = Faulty(raises_in=where)
    guarded = Guarded(inner, VOCAB_SIZE)
    with caplog.at_level(logging.ERROR):
        assert steps(guarded) == [[] if where == "propose" else [1, 2], [], []]
    assert inner.calls == ["propose", "observe"][: 1 + (where == "observe")]
    assert len(caplog.records) == 1 and "without drafts" in caplog.text and "on purpose" in caplog.text


def test_proposer_whose_needs_raise_asks_for_nothing_and_proposes_no_more(caplog: pytest.LogCaptureFixture) -> None:
    guarded = Guarded(Faulty(raises_in="needs"), VOCAB_SIZE)
    assert guarded.needs == guarded.needs == StepOptions()
    assert steps(guarded) == [[], [], []]
    assert len(caplog.records) == 1 and "failed in needs" in caplog.text


@pytest.mark.parametrize("where", ["needs", "close"])
def test_proposer_that_raises_outside_propose_fails_neither_the_request_nor_its_release(where: str) -> None:
    """The loop and its end, as the request handler runs them: the text comes out and the target is released."""
    target, proposer = TableTarget(VOCAB_SIZE), Guarded(Faulty(raises_in=where), VOCAB_SIZE)
    tokens, _ = decode(target, proposer, [3], Sampling(), Limits(8, 100, 4))
    proposer.close()
    assert tokens == generate(target.logits, [3], Sampling(), 8)


def test_proposer_whose_first_proposal_reads_a_long_context_may_take_its_time_once() -> None:
    """Of a text that is continued or begun anew, the first proposal reads more than the prompt."""

    class Reading(Faulty):
        def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
            time.sleep(0.02)
            return super().propose(context, sampling, budget)

    guarded, context = Guarded(Reading(), VOCAB_SIZE, limit_s=0.01), Context([3])
    context.commit([4, 5])
    lengths = [guarded.propose(context, Sampling(), BUDGET).tree.num_nodes for _ in range(3)]
    assert lengths[0] == 2 and lengths[2] == 0


@pytest.mark.parametrize("name", TREES)
def test_tree_that_breaks_a_law_is_dropped(name: str) -> None:
    assert steps(Guarded(Faulty(TREES[name]), VOCAB_SIZE)) == [[], [], []]


def test_tree_beyond_the_budget_is_cut_and_not_held_against_it() -> None:
    assert steps(Guarded(Faulty(TokenTree.chain([1, 2, 3, 4, 5])), VOCAB_SIZE)) == [[1, 2, 3]] * 3


# Drawn drafts


P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])
BAD_BEHIND = 0  # the drafter's next q is bad where it drew this token


def drawn_from(probs: FloatArray) -> Distribution:
    return Distribution(np.arange(len(probs), dtype=np.int32), probs.astype(np.float32))


class Drawing(Proposer):
    """Draws a chain of two from Q; after one of its tokens the next q is no distribution."""

    name, needs = "drawing", StepOptions()

    def __init__(self, branch: Branch) -> None:
        self._branch = branch

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        tokens = [self._branch.choose(Q), self._branch.choose(Q)]
        second = drawn_from(np.array([np.nan, 0.5, 0.5]) if tokens[0] == BAD_BEHIND else Q)
        return Proposal(TokenTree.chain(tokens), (self.name,) * 2, (drawn_from(Q), second))


def emitted(rule: Rule, branch: Branch, keep: Callable[[Proposal], Proposal] = lambda proposal: proposal) -> list[int]:
    """The first two tokens that come of one proposal, p being the same everywhere."""
    guarded = Guarded(Drawing(branch), len(P))
    proposal = keep(guarded.propose(Context([1]), Sampling(1.0, rule=rule), BUDGET))
    tree, p = proposal.tree, np.tile(P, (proposal.tree.num_nodes + 1, 1))
    q = dense_q(tree, proposal.q, len(P))
    accept = accept_block if rule is Rule.BLOCK else accept_rejection
    tokens = Acceptance(*accept(tree, p, q, 1, branch)).tokens(tree)
    return [*tokens, branch.choose(P)][:2]


def is_whole(proposal: Proposal) -> Proposal:
    """What dropping the whole proposal for its second q would leave."""
    return proposal if proposal.tree.num_nodes == 2 else Proposal.empty()


@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK])
def test_a_bad_q_behind_a_draw_costs_what_follows_and_does_not_bend_the_law(rule: Rule) -> None:
    expected = {(a, b): P[a] * P[b] for a in range(3) for b in range(3)}
    found = law(lambda branch: tuple(emitted(rule, branch)))
    assert found == pytest.approx(expected, abs=1e-7)  # q crosses as float32
    dropped = law(lambda branch: tuple(emitted(rule, branch, is_whole)))
    assert max(abs(dropped[pair] - expected[pair]) for pair in expected) > 0.02


def test_a_drafter_that_drew_from_a_bad_q_is_asked_no_more(caplog: pytest.LogCaptureFixture) -> None:
    first = Drawing(Branch([BAD_BEHIND, 1]))
    guarded = Guarded(first, len(P))
    lengths = [guarded.propose(Context([1]), Sampling(1.0), BUDGET).tree.num_nodes for _ in range(3)]
    assert lengths == [1, 0, 0]
    assert len(caplog.records) == 1 and "1 nodes from a bad q" in caplog.text


def test_of_a_drawn_tree_the_bad_family_goes_with_what_hangs_below_it() -> None:
    good, bad = drawn_from(Q), drawn_from(np.array([0.5, -1.0, 0.5]))
    tree = TokenTree(np.array([0, 1, 2, 1, 0, 2], np.int32), np.array([0, 0, 1, 1, 2, 3], np.int32))
    for q, kept in (
        ((good,) * 6, [1, 2, 3, 4, 5, 6]),
        ((good, good, good, bad, good, good), [1, 2, 5]),  # 3 has no other q than 4, and 6 hangs below it
        ((good, good, good, good, good, bad), [1, 2, 3, 4, 5]),
        ((good, bad, good, good, good, good), []),
        ((), [1, 2, 3, 4, 5, 6]),
    ):
        assert nodes_with_valid_q(tree, q, len(P)).tolist() == kept
    with pytest.raises(EngineError, match="5 distributions q for 6 nodes"):
        nodes_with_valid_q(tree, (good,) * 5, len(P))
