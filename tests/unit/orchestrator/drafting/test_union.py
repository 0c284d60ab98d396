"""Several proposers in one tree: merged, shared out, counted by source, each with its own hidden states."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from orchestrator.core.context import Context
from orchestrator.core.errors import RequestError
from orchestrator.core.proposal import Budget, Proposal, Proposer, Step
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, HiddenStates, StepOptions
from orchestrator.drafting.registry import select_method
from orchestrator.drafting.union import Union
from tests.support.decode import observe

DRAFTERS = frozenset({"eagle", "eagle3", "medusa"})


class Scripted(Proposer):
    """Proposes the same paths over and over, and keeps what it is told."""

    def __init__(self, name: str, *paths: list[int], options: StepOptions | None = None) -> None:
        self.name = name
        self._tree = TokenTree.from_paths(paths)
        self._want = options or StepOptions()
        self.asked: list[Budget] = []
        self.features: list[Any] = []
        self.closed = False

    @property
    def needs(self) -> StepOptions:
        return self._want

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        self.asked.append(budget)
        return Proposal.of(self._tree, self.name)

    def observe(self, steps: Sequence[Step]) -> None:
        self.features += [step.acceptance.features for step in steps]

    def close(self) -> None:
        self.closed = True


def union_of(*members: Proposer, caps: tuple[int, ...] = ()) -> Union:
    return Union(members, caps or [128] * len(members))


def propose(union: Union, max_nodes: int = 20, max_depth: int = 9) -> Proposal:
    return union.propose(Context([1, 2]), Sampling(), Budget(max_nodes, max_depth))


def named(proposal: Proposal) -> dict[tuple[int, ...], str]:
    return dict(zip(proposal.tree.paths[1:], proposal.sources, strict=True))


def test_a_path_that_two_propose_is_one_node_with_both_names() -> None:
    union = union_of(Scripted("a", [5, 6, 7]), Scripted("b", [5, 6, 8], [9]))
    assert named(propose(union)) == {
        (5,): "a+b", (5, 6): "a+b", (5, 6, 7): "a", (5, 6, 8): "b", (9,): "b",
    }  # fmt: skip
    assert union.name == "a+b"


def test_siblings_are_tried_in_the_order_of_the_members() -> None:
    tree = propose(union_of(Scripted("a", [7]), Scripted("b", [5], [7], [6]))).tree
    assert list(tree.children[0]) == [7, 5, 6]


def test_each_member_may_fill_its_share_of_what_is_left() -> None:
    chain, wide = Scripted("a", [1] * 9), Scripted("b", *([n] for n in range(2, 30)))
    proposal = propose(union_of(chain, wide), max_nodes=10)
    assert list(proposal.sources).count("a") == 5
    assert proposal.tree.num_nodes == 10
    assert wide.asked[0].max_nodes == 5


def test_what_one_leaves_the_others_have() -> None:
    silent, wide = Scripted("a"), Scripted("b", *([n] for n in range(30)))
    assert propose(union_of(silent, wide), max_nodes=10).tree.num_nodes == 10


def test_a_member_keeps_to_its_own_max_nodes() -> None:
    wide = [Scripted(name, *([n] for n in range(start, start + 30))) for name, start in (("a", 0), ("b", 50))]
    proposal = propose(union_of(*wide, caps=(3, 128)), max_nodes=10)
    assert (proposal.sources.count("a"), proposal.sources.count("b")) == (3, 7)


def test_nothing_goes_deeper_than_the_budget() -> None:
    assert propose(union_of(Scripted("a", [1, 2, 3]), Scripted("b", [4, 5])), max_depth=1).tree.num_nodes == 2


def test_union_of_empty_proposals_is_empty() -> None:
    proposal = propose(union_of(Scripted("a"), Scripted("b")))
    assert (proposal.tree.num_nodes, proposal.sources) == (0, ())


@pytest.mark.parametrize("alone", [False, True])
def test_each_member_is_given_the_states_that_it_reads(alone: bool) -> None:
    last = Scripted("a", options=StepOptions(features_from=7, hidden_states=HiddenStates.LAST))
    layers = Scripted("b", options=StepOptions(features_from=3, hidden_states=HiddenStates.LAYERS))
    union = union_of(layers, Scripted("c") if alone else last)
    assert union.needs == StepOptions(
        features_from=3, hidden_states=HiddenStates.LAYERS if alone else HiddenStates.LAST | HiddenStates.LAYERS
    )
    rows = np.arange(24, dtype=np.float32).reshape(2, 12)
    observe(union, TokenTree.bare(), Acceptance((), 4, features=rows, features_start=3))
    if alone:
        assert np.array_equal(layers.features[0], rows)
    else:
        assert np.array_equal(last.features[0], rows[:, :3])
        assert np.array_equal(layers.features[0], rows[:, 3:])


def test_closing_closes_all() -> None:
    members = [Scripted("a"), Scripted("b")]
    union_of(*members).close()
    assert all(member.closed for member in members)


def test_a_union_s_parameters_stand_under_its_members_names() -> None:
    text = json.dumps({"max_nodes": 9, "eagle2": {"top_k": 3}, "prompt_lookup": {"draft_len": 4}})
    found = select_method("prompt_lookup+eagle2", text, DRAFTERS, {})
    lookup, eagle = found.members
    assert select_method("prompt_lookup+eagle2", "", DRAFTERS, {"draft_len": 2}).members[0].config.draft_len == 2  # type: ignore[attr-defined]
    assert (found.config.max_nodes, lookup.config.draft_len, eagle.config.top_k) == (9, 4, 3)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("method", "parameters", "words"),
    [
        ("prompt_lookup+egle2", {}, "nearest: 'eagle2'|did you mean 'eagle2'"),
        ("eagle2+redrafter", {}, "needs the drafter 'redrafter'"),
        ("eagle2+eagle2", {}, "2..4 different methods"),
        ("prompt_lookup+suffix+ngram+eagle+eagle3", {}, "2..4 different methods"),
        ("eagle2+none", {}, "it proposes nothing"),
        ("eagle2+lookahead", {}, "learns from the target's tokens"),
        ("eagle2+", {}, "method ''"),
        ("prompt_lookup+eagle2", {"top_k": 3}, "top_k"),
        ("prompt_lookup+eagle2", {"eagle2": 3}, "eagle2 in input speculation_config must be a JSON object, got int"),
        ("prompt_lookup+eagle2", {"eagle2": {"topk": 3}}, "topk"),
    ],
)
def test_a_union_that_cannot_be_is_refused(method: str, parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        select_method(method, json.dumps(parameters), DRAFTERS, {})


def test_block_verification_refuses_unions() -> None:
    with pytest.raises(RequestError, match="several proposers"):
        select_method("prompt_lookup+eagle2", "", DRAFTERS, {}).check_rule(Rule.BLOCK)
