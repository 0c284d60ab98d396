"""Drafts that a grammar forbids are left out, where that leaves the text its law."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from orchestrator.core.context import Context
from orchestrator.core.proposal import Budget, Proposal, Proposer, Step
from orchestrator.core.sampled_drafts import draft_distribution
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, Distribution, StepOptions
from orchestrator.drafting.guarded import Guarded
from tests.support.decode import observe

TREE = TokenTree.from_paths([[1, 2, 3], [4, 5], [6]])
BUDGET = Budget(99, 99)


@dataclass
class Scripted(Proposer):
    q: tuple[Distribution, ...] = ()
    needs: StepOptions = StepOptions()  # noqa: RUF009
    name: str = "scripted"
    observed: list[Any] = field(default_factory=list)
    closed: bool = False

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        return Proposal(TREE, tuple(f"s{node}" for node in range(1, 7)), self.q)

    def observe(self, steps: Sequence[Step]) -> None:
        self.observed += [step.proposal.tree for step in steps]

    def close(self) -> None:
        self.closed = True


@dataclass
class NoFives:
    """A grammar without the token 2, 5 only after an output of one token."""

    output: list[int] = field(default_factory=list)

    def follow(self, output: list[int]) -> None:
        self.output = list(output)

    def legal_nodes(self, tree: TokenTree) -> np.ndarray:
        banned = {2} | (set() if len(self.output) == 1 else {5})
        return np.array([i for i, path in enumerate(tree.paths) if i and not banned & set(path)], np.int32)


def pruned(proposer: Scripted, rule: Rule = Rule.COUPLED, output: tuple[int, ...] = ()) -> Proposal:
    context = Context([9])
    context.commit(output)
    return Guarded(proposer, 8, NoFives()).propose(context, Sampling(rule=rule), BUDGET)  # type: ignore[arg-type]


Q = tuple(draft_distribution(np.arange(8, dtype=np.int32), np.full(8, 0.125)) for _ in range(6))


def test_what_the_grammar_forbids_goes_with_all_below_it() -> None:
    proposal = pruned(Scripted())
    assert proposal.tree.paths[1:] == [(1,), (4,), (6,)] and proposal.sources == ("s1", "s4", "s6")
    assert pruned(Scripted(), output=(7,)).tree.paths[1:] == [(1,), (4,), (4, 5), (6,)]


@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.TYPICAL])
def test_drawn_drafts_lose_nodes_and_their_q_where_the_rule_does_not_ask_for_it(rule: Rule) -> None:
    proposal = pruned(Scripted(Q), rule)
    assert proposal.tree.num_nodes == len(proposal.q) == 3


@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK])
def test_drawn_drafts_stay_whole_where_leaving_one_out_by_its_value_would_bend_the_law(rule: Rule) -> None:
    assert pruned(Scripted(Q), rule).tree is TREE
    assert pruned(Scripted(), rule).tree.num_nodes == 3, "chosen ones lose what has no probability anyway"


def test_a_proposer_that_learns_from_picks_keeps_its_nodes() -> None:
    assert pruned(Scripted(needs=StepOptions(target_tokens=True))).tree is TREE


def test_what_is_observed_and_closed_reaches_the_proposer() -> None:
    inner = Scripted()
    outer = Guarded(inner, 8, NoFives())  # type: ignore[arg-type]
    observe(outer, TREE, Acceptance((), 1))
    outer.close()
    assert inner.observed == [TREE] and inner.closed and outer.name == "scripted"


def test_leaving_out_a_drawn_token_by_its_value_does_bend_the_law() -> None:
    """Why the exception stands: p = (0, 1/2, 1/2), q = (1/2, 1/2, 0), token 0 pruned before `rejection`."""
    p, q = np.array([0, 0.5, 0.5]), np.array([0.5, 0.5, 0])
    accepted = np.minimum(p, q)
    residual = np.maximum(p - q, 0) / np.maximum(p - q, 0).sum()
    sound = accepted + (1 - accepted.sum()) * residual
    # Drawn and pruned: without a draft the token comes from p itself.
    bent = accepted + q[0] * p + (1 - accepted.sum() - q[0]) * residual
    np.testing.assert_allclose(sound, p)
    assert abs(bent - p).sum() > 0.2
