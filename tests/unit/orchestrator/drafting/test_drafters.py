"""What a head is handed, what the next step is asked for, and what becomes of a head that is silent."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from orchestrator.core.context import Context
from orchestrator.core.errors import RequestError
from orchestrator.core.messages.codec import decode_call, encode_call
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.drafter import DraftRequest
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.methods import METHODS
from orchestrator.core.proposal import Budget, Proposer
from orchestrator.core.sampling_params import Rule, Sampling, as_float32
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, DraftResponse, HeadInput, HiddenStates, StepOptions
from orchestrator.drafting.dependencies import NO_ANSWER
from orchestrator.drafting.drafter_configs import DraftModelConfig, DynamicConfig, StaticConfig
from orchestrator.drafting.drafters import DraftModel, HeadProposer
from orchestrator.drafting.registry import select_method
from tests.support.decode import dependencies, observe

TREE = TokenTree.from_paths([[4, 5], [6]])
BUDGET = Budget(20, 5)


class Line:
    """Answers with a tree, and says how far its cache reaches."""

    has_given_up = False
    use = None

    def __init__(self, *answers: DraftResponse) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[int, Budget, HeadInput]] = []
        self.samplings: list[Sampling] = []

    def propose(self, context: Context, sampling: Sampling, budget: Budget, head: HeadInput) -> DraftResponse:
        self.samplings.append(sampling)
        self.calls.append((len(context), budget, head))
        return self.answers.pop(0)

    def close(self) -> None:
        return


def rows(*values: float) -> np.ndarray:
    return np.array(values, np.float32)[:, None]


def stepped(proposer: HeadProposer, context: Context, features: np.ndarray | None, start: int, *tokens: int) -> None:
    observe(proposer, TREE, Acceptance((), tokens[-1], features=features, features_start=start))
    context.commit(tokens)


def test_a_head_without_a_cache_is_handed_the_newest_state_alone() -> None:
    line = Line(DraftResponse(TREE))
    proposer = HeadProposer(StaticConfig(), dependencies("medusa", drafter_client=lambda name: line))
    context = Context([1, 2, 3])
    assert proposer.propose(context, Sampling(), BUDGET).tree.num_nodes == 0
    assert proposer.needs == StepOptions(features_from=2, hidden_states=HiddenStates.LAST)
    stepped(proposer, context, rows(0.2, 0.3, 0.4), 2, 7, 8, 9)
    assert proposer.propose(context, Sampling(), BUDGET).sources == ("medusa",) * 3
    ((length, budget, head),) = line.calls
    assert (length, budget, head.features_start) == (6, BUDGET, 4)
    assert np.array_equal(head.features, rows(0.4))
    assert proposer.needs.features_from == 5


def test_a_head_with_a_cache_says_what_it_lacks() -> None:
    line = Line(DraftResponse(TokenTree.bare(), cached_len=16), DraftResponse(TREE, cached_len=20))
    proposer = HeadProposer(DynamicConfig(depth=3), dependencies("eagle2", drafter_client=lambda name: line))
    context = Context(list(range(20)))
    proposer.propose(context, Sampling(), BUDGET)
    assert proposer.needs.features_from == 16
    stepped(proposer, context, rows(1, 2, 3, 4), 16, 7)
    assert proposer.propose(context, Sampling(), BUDGET).tree is TREE
    assert proposer.needs.features_from == 20
    assert [(n, b.max_depth) for n, b, _ in line.calls] == [(20, 3), (21, 3)]
    assert np.array_equal(line.calls[1][2].features, rows(1, 2, 3, 4))
    assert line.calls[0][2].features is None


def test_once_a_head_has_refused_the_request_no_state_is_asked_for() -> None:
    line = Line(NO_ANSWER)
    proposer = HeadProposer(StaticConfig(), dependencies("eagle", drafter_client=lambda name: line))
    context = Context(list(range(20)))
    proposer.propose(context, Sampling(), BUDGET)
    assert proposer.needs.features_from == 19
    line.has_given_up = True
    assert proposer.needs == StepOptions()


def test_while_a_head_is_silent_the_newest_state_alone_is_asked_for() -> None:
    """Rows for nobody are not sent; the head says what it lacks when it is back."""
    line = Line(DraftResponse(TREE, cached_len=19), NO_ANSWER, DraftResponse(TokenTree.bare(), cached_len=19))
    proposer = HeadProposer(DynamicConfig(), dependencies("eagle3", drafter_client=lambda name: line))
    context = Context(list(range(20)))
    proposer.propose(context, Sampling(), BUDGET)
    assert proposer.needs == StepOptions(features_from=19, hidden_states=HiddenStates.LAYERS)
    stepped(proposer, context, rows(1), 19, 7)
    assert proposer.propose(context, Sampling(), BUDGET).tree.num_nodes == 0
    assert proposer.needs.features_from == 20
    stepped(proposer, context, rows(2, 3), 20, 7, 8)
    proposer.propose(context, Sampling(), BUDGET)
    assert line.calls[2][2].features_start == 20
    assert proposer.needs.features_from == 19


def test_a_request_without_nodes_proposes_nothing_and_needs_no_hidden_states() -> None:
    proposer = HeadProposer(DynamicConfig(max_nodes=0), dependencies("eagle2", drafter_client=lambda name: Line()))
    assert proposer.propose(Context([1, 2]), Sampling(), Budget(0, 5)).tree.num_nodes == 0
    assert proposer.needs == StepOptions()


def test_no_choices_are_the_head_s_own() -> None:
    assert select_method("eagle", '{"choices": []}', frozenset({"eagle"}), {}).config.max_nodes == 24


@pytest.mark.parametrize("budget", [Budget(0, 5), Budget(5, 0)])
def test_without_room_the_head_is_left_alone(budget: Budget) -> None:
    line = Line()
    proposer = HeadProposer(DynamicConfig(), dependencies("eagle2", drafter_client=lambda name: line))
    assert proposer.propose(Context([1, 2]), Sampling(), budget).tree.num_nodes == 0
    assert line.calls == []


@pytest.mark.parametrize("method", ["medusa", "eagle", "eagle2", "eagle3", "redrafter"])
def test_what_a_head_is_told_crosses_the_wire(method: str) -> None:
    config = select_method(method, "", frozenset({"medusa", "eagle", "eagle3", "redrafter"}), {}).config
    head = config.shape  # type: ignore[attr-defined]
    told = HeadInput(rows(1, 2), 5, head.choices, head.width, 0.25, True, 0.35)
    sent = DraftRequest(delta_of(Context([1, 2, 3]), 1, 9, ""), Sampling(), 7, 3, told)
    found = decode_call(encode_call(sent, ""), "").head
    assert np.array_equal(found.features, told.features)
    assert (found.features_start, found.width, found.choices.paths) == (5, head.width, head.choices.paths)
    assert (found.min_prob, found.draws, found.sharpness) == (0.25, True, 0.35)


@pytest.mark.parametrize("states", [HiddenStates.LAST, HiddenStates.LAYERS, HiddenStates.LAST | HiddenStates.LAYERS])
def test_which_states_are_wanted_crosses_the_wire(states: HiddenStates) -> None:
    options = StepOptions(target_tokens=True, features_from=4, hidden_states=states)
    sent = StepRequest(delta_of(Context([1, 2]), 0, 9, ""), TREE, Sampling(), options, 1000)
    assert decode_call(encode_call(sent, ""), "").options == options


@pytest.mark.parametrize(
    ("method", "parameters", "words"),
    [
        ("medusa", {"choices": [[0], [99]]}, r"choices must be a list of lists of ranks in 0\.\.63"),
        ("eagle", {"choices": 3}, "got 3"),
        ("eagle2", {"top_k": 33}, r"top_k must be an integer in 1\.\.32, got 33"),
        ("eagle3", {"depth": 0}, r"depth must be an integer in 1\.\.16, got 0"),
        ("redrafter", {"beam": 3}, "beams"),
        ("eagle2", {"choices": [[0]]}, "choices"),
        ("eagle2", {"sharpness": 0.0}, r"sharpness must be a number in 0\.01\.\.1, got 0\.0"),
        ("eagle3", {"sharpnes": 0.5}, "sharpness"),
        ("redrafter", {"draft_temperature": -1.0}, r"draft_temperature must be a number in 0\.\.100, got -1\.0"),
        ("medusa", {"draft_top_p": 0}, "draft_top_p must be a number above 0 and at most 1, got 0"),
        ("eagle", {"draft_top_k": -1}, r"draft_top_k must be an integer"),
    ],
)
def test_parameters_out_of_range_are_refused(method: str, parameters: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        select_method(method, json.dumps(parameters), frozenset({"medusa", "eagle", "eagle3", "redrafter"}), {})


REJECTION = Sampling(0.8, top_k=40, top_p=0.75, min_p=0.125, seed=5, rule=Rule.REJECTION)
HEADS = ("eagle", "eagle2", "eagle3", "redrafter")


def proposer_of(method: str, line: Line, **parameters: object) -> Proposer:
    """A head that has the states it needs."""
    config = select_method(method, json.dumps(parameters), frozenset({"eagle", "eagle3", "redrafter"}), {}).config
    proposer = HeadProposer(config, dependencies(method, drafter_client=lambda name: line))  # type: ignore[arg-type]
    observe(proposer, TREE, Acceptance((), 1, features=rows(1), features_start=18))
    return proposer


@pytest.mark.parametrize("method", HEADS)
def test_heads_sample_where_the_rule_reads_q(method: str) -> None:
    samplings = {REJECTION: True, replace(REJECTION, rule=Rule.COUPLED): False, Sampling(rule=Rule.REJECTION): False}
    for sampling, draws in samplings.items():
        line = Line(DraftResponse(TREE))
        proposer_of(method, line).propose(Context(list(range(20))), sampling, BUDGET)
        assert line.calls[0][2].draws == draws
    for parameters in ({"draws": False}, {"draft_temperature": 0}):
        line = Line(DraftResponse(TREE))
        proposer_of(method, line, **parameters).propose(Context(list(range(20))), REJECTION, BUDGET)
        assert not line.calls[0][2].draws


@pytest.mark.parametrize("method", HEADS)
def test_beside_other_methods_no_head_samples(method: str) -> None:
    loaded = frozenset({"eagle", "eagle3", "redrafter"})
    (member, _) = select_method(f"{method}+suffix", "", loaded, {}).members
    assert not member.config.as_member().draws  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", HEADS)
def test_a_draft_may_have_a_sampling_of_its_own(method: str) -> None:
    line = Line(DraftResponse(TREE))
    keys = {"draft_temperature": 0.1, "draft_top_k": 0, "draft_top_p": 1.0, "sharpness": 0.5}
    proposer_of(method, line, **keys).propose(Context(list(range(20))), REJECTION, BUDGET)
    assert line.samplings == [replace(REJECTION, temperature=as_float32(0.1), top_k=0, top_p=1.0)]
    assert line.calls[0][2].sharpness == 0.5


def test_a_draft_is_sampled_as_the_target_unless_the_request_says_otherwise() -> None:
    for keys, sampling in (({}, REJECTION), ({"draft_temperature": 0.5, "draft_top_k": 3}, Sampling())):
        line = Line(DraftResponse(TREE))
        proposer_of("eagle2", line, **keys).propose(Context(list(range(20))), sampling, BUDGET)
        assert line.samplings == [sampling]


def test_a_draft_model_may_have_a_sampling_of_its_own() -> None:
    line = Line(DraftResponse(TREE))
    config = DraftModelConfig(draft_temperature=0.5, draft_top_k=7)
    proposer = DraftModel(config, dependencies("draft_model", drafter_client=lambda name: line))
    proposer.propose(Context([1, 2]), REJECTION, BUDGET)
    assert line.samplings == [replace(REJECTION, temperature=0.5, top_k=7)]


def test_a_draft_model_s_depth_is_not_limited_by_its_share_of_a_union_s_nodes() -> None:
    """Native code goes on with this depth when the share is larger."""
    line = Line(DraftResponse(TokenTree.chain([4, 5])))
    proposer = DraftModel(DraftModelConfig(draft_len=5), dependencies("draft_model", drafter_client=lambda name: line))
    proposer.propose(Context([1, 2]), Sampling(), Budget(2, 9))
    assert line.calls[0][1] == Budget(2, 5)


def draft_model_call(sampling: Sampling, budget: Budget, **parameters: object) -> tuple[Budget, HeadInput]:
    """Return what a draft model is asked for."""
    line = Line(DraftResponse(TREE))
    config = select_method("draft_model", json.dumps(parameters), frozenset({"draft"}), {}).config
    own = dependencies("draft_model", drafter_client=lambda name: line)
    proposal = DraftModel(config, own).propose(Context([1, 2]), sampling, budget)  # type: ignore[arg-type]
    assert proposal.tree is TREE and proposal.sources == ("draft_model",) * 3
    return line.calls[0][1:]


def test_a_draft_model_drafts_a_chain_unless_top_k_is_set() -> None:
    for sampling in (Sampling(), REJECTION):
        budget, head = draft_model_call(sampling, Budget(20, 9))
        assert budget == Budget(5, 5) and head.width == 0 and head.min_prob == 0.4
        budget, head = draft_model_call(sampling, Budget(20, 9), top_k=4, draft_len=3, sharpness=0.5)
        assert budget == Budget(20, 3) and (head.width, head.sharpness) == (4, 0.5)
        assert draft_model_call(sampling, Budget(20, 2), top_k=4)[0] == Budget(20, 2)


def test_a_draft_model_s_tree_is_sampled_where_the_rule_reads_q() -> None:
    samplings = {REJECTION: True, replace(REJECTION, rule=Rule.COUPLED): False, Sampling(rule=Rule.REJECTION): False}
    for sampling, draws in samplings.items():
        assert draft_model_call(sampling, BUDGET, top_k=2)[1].draws == draws
    for parameters in ({"draws": False}, {"draft_temperature": 0}):
        assert not draft_model_call(REJECTION, BUDGET, top_k=2, **parameters)[1].draws
    budget, head = draft_model_call(REJECTION, BUDGET, draws=False)
    assert (budget, head.width, head.draws) == (Budget(5, 5), 1, False), "a chain of the likeliest tokens"
    assert draft_model_call(replace(REJECTION, rule=Rule.COUPLED), BUDGET, draws=False)[1].width == 0


@pytest.mark.parametrize(
    ("parameters", "max_nodes"), [({}, 128), ({"top_k": 2}, 24), ({"top_k": 2, "max_nodes": 40}, 40)]
)
def test_a_draft_model_s_tree_has_as_many_nodes_as_a_head_s(parameters: dict[str, int], max_nodes: int) -> None:
    assert select_method("draft_model", json.dumps(parameters), frozenset({"draft"}), {}).config.max_nodes == max_nodes


def test_beside_other_methods_a_draft_model_s_tree_is_not_sampled_and_its_chain_is_as_ever() -> None:
    for top_k, draws in ((1, True), (3, False)):
        config = json.dumps({"draft_model": {"top_k": top_k}})
        (member, _) = select_method("draft_model+suffix", config, frozenset({"draft"}), {}).members
        own = member.config.as_member()
        assert (own.draws, own.shape.width) == (draws, 0 if top_k == 1 else 3)  # type: ignore[attr-defined]


def test_a_draft_model_s_tree_is_refused_by_the_rule_block() -> None:
    select_method("draft_model", "", frozenset({"draft"}), {}).check_rule(Rule.BLOCK)
    with pytest.raises(RequestError, match="has top_k above 1"):
        select_method("draft_model", '{"top_k": 2}', frozenset({"draft"}), {}).check_rule(Rule.BLOCK)
    with pytest.raises(RequestError, match=r"top_k must be an integer in 1\.\.32, got 33"):
        select_method("draft_model", '{"top_k": 33}', frozenset({"draft"}), {})


def test_a_static_tree_that_is_a_chain_may_be_verified_as_a_block() -> None:
    chain = select_method("medusa", json.dumps({"choices": [[0, 0, 0]]}), frozenset({"medusa"}), {})
    chain.check_rule(Rule.BLOCK)
    with pytest.raises(RequestError, match="has a tree"):
        select_method("medusa", "", frozenset({"medusa"}), {}).check_rule(Rule.BLOCK)


@pytest.mark.parametrize(("given", "max_nodes"), [({}, 24), ({"max_nodes": 9}, 9)])
def test_choices_are_not_cut_unless_asked(given: dict[str, int], max_nodes: int) -> None:
    choices = [[rank] for rank in range(40)]
    assert select_method("medusa", json.dumps(given), frozenset({"medusa"}), {}).config.max_nodes == max_nodes
    named = select_method("medusa", json.dumps({"choices": choices, **given}), frozenset({"medusa"}), {}).config
    assert named.max_nodes == given.get("max_nodes", 40)


def test_heads_want_the_states_that_they_read() -> None:
    assert METHODS["eagle3"].options.hidden_states == HiddenStates.LAYERS
    assert {METHODS[name].options.hidden_states for name in ("medusa", "eagle", "eagle2", "redrafter")} == {
        HiddenStates.LAST
    }
