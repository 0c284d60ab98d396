"""A proposer that raises, or proposes what breaks a law, costs the drafts and never the text."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np
import pytest

from orchestrator.context import Context
from orchestrator.proposers.guarded import Guarded
from orchestrator.tree import TokenTree
from orchestrator.types import Acceptance, Budget, Proposal, Sampling, Want

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
    want: Want = field(default_factory=lambda: Want(picks=True))
    calls: list[str] = field(default_factory=list)

    def _called(self, what: str) -> None:
        self.calls.append(what)
        if what == self.raises_in:
            raise ValueError("on purpose")

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        self._called("propose")
        return Proposal.of(self.tree, self.name)

    def observe(self, tree: TokenTree, acceptance: Acceptance) -> None:
        self._called("observe")

    def close(self) -> None:
        self._called("close")


def steps(proposer: Guarded, count: int = 3) -> list[list[int]]:
    """Run steps and return what was proposed in each."""
    found = []
    for _ in range(count):
        tree = proposer.propose(Context([3]), Sampling(), BUDGET).tree
        proposer.observe(tree, Acceptance((), 5))
        found.append(tree.tokens.tolist())
    return found


def test_sound_proposer_is_let_through() -> None:
    inner = Faulty()
    guarded = Guarded(inner, VOCAB_SIZE)
    assert (guarded.name, guarded.want) == ("faulty", Want(picks=True))
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
    assert len(caplog.records) == 1 and "undrafted" in caplog.text and "on purpose" in caplog.text


@pytest.mark.parametrize("name", TREES)
def test_tree_that_breaks_a_law_is_dropped(name: str) -> None:
    assert steps(Guarded(Faulty(TREES[name]), VOCAB_SIZE)) == [[], [], []]


def test_tree_beyond_the_budget_is_cut_and_not_held_against_it() -> None:
    assert steps(Guarded(Faulty(TokenTree.chain([1, 2, 3, 4, 5])), VOCAB_SIZE)) == [[1, 2, 3]] * 3
