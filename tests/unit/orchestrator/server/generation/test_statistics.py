"""Statistics: the papers' formulas against their published tables, and the counts of steps worked by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np
import pytest

from orchestrator.core.proposal import Budget, Proposal
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, Distribution, EngineSpeculationResult
from orchestrator.server.statistics import (
    SourceCount,
    Statistics,
    best_gamma,
    expected_tokens,
    walltime_gain,
)

# Leviathan et al. 2023, table 1 (c = 0): α, γ, speed.
TABLE_1 = [(0.6, 2, 1.96), (0.7, 3, 2.53), (0.8, 2, 2.44), (0.8, 5, 3.69), (0.9, 2, 2.71), (0.9, 10, 6.86)]


@pytest.mark.parametrize(("alpha", "gamma", "speed"), TABLE_1)
def test_formulas_give_leviathan_s_table(alpha: float, gamma: int, speed: float) -> None:
    assert walltime_gain(alpha, gamma, 0.0) == pytest.approx(speed, abs=0.0051)
    assert expected_tokens(alpha, gamma) == walltime_gain(alpha, gamma, 0.0)


def test_drafting_pays_if_and_only_if_alpha_is_greater_than_c() -> None:
    for alpha, c in ((0.1, 0.2), (0.2, 0.2), (0.5, 0.9)):
        assert best_gamma(alpha, c) == 0
    for alpha, c in ((0.21, 0.2), (0.05, 0.04)):
        assert best_gamma(alpha, c) > 0
        assert walltime_gain(alpha, 1, c) == pytest.approx((1 + alpha) / (1 + c))


def accepting(path: Iterable[int]) -> Acceptance:
    return Acceptance(tuple(path), 0)


def tree_by_hand() -> Proposal:
    """1 → 2 → 3 and 1 → 4, 5; nodes 1…5 by depth: 1, 2, 3, 2, 1."""
    tree = TokenTree(np.array([1, 2, 3, 4, 5], np.int32), np.array([0, 1, 2, 1, 0], np.int32))
    q = tuple(Distribution(np.array([node], np.int32), np.ones(1, np.float32)) for node in range(1, 6))
    return Proposal(tree, ("a", "a", "b", "b", "a"), q)


def test_statistics_by_hand() -> None:
    statistics = Statistics()
    statistics.observe(tree_by_hand(), accepting([1, 4]), 3, 0.5, 9.0)  # node 4 has no child: depth 3 is not tested
    statistics.observe(tree_by_hand(), accepting([1]), 2, 0.2, 1.0)
    statistics.observe(tree_by_hand(), accepting([]), 1, 0.4, 3.0)
    statistics.observe(Proposal.empty(), accepting([]), 1, 0.0, 2.0)
    assert statistics.drafted == [6, 6, 3]
    assert statistics.tested == [3, 2, 0]
    assert statistics.accepted == [2, 1, 0]
    assert {name: (count.num_drafted, count.num_accepted) for name, count in statistics.sources.items()} == {
        "a": (9, 2), "b": (6, 1),
    }  # fmt: skip
    assert (statistics.num_steps, statistics.num_draft_tokens, statistics.num_accepted_tokens) == (4, 15, 3)
    assert statistics.alpha == 3 / 5 and statistics.gamma == 9 / 4
    # The first step's times hold the prompt and do not count: 0.6 s for 6 levels, 6 s for 3 steps.
    assert statistics.c == pytest.approx((0.6 / 6) / (6.0 / 3))
    assert statistics.acceptance_rate == 3 / 15


def test_tokens_behind_a_stop_are_no_accepted_tokens() -> None:
    """Both lengths are of what the client gets; the depths, and α, are of what the target agreed with."""
    statistics = Statistics()
    statistics.observe(Proposal.chain([1] * 12, "s"), accepting(range(1, 13)), 3, 0.0, 1.0)
    assert (statistics.num_accepted_tokens, statistics.sources["s"].num_accepted) == (3, 3)
    assert statistics.accepted == [1] * 12 and statistics.alpha == 1.0
    said = statistics.to_dict()
    assert said["acceptance_length"] == said["accepted_per_step"] == 3.0


def test_to_dict_has_both_lengths_and_is_json() -> None:
    statistics = Statistics()
    statistics.observe(tree_by_hand(), accepting([1, 4]), 3, 0.5, 9.0)
    statistics.observe(tree_by_hand(), accepting([]), 1, 0.3, 3.0)
    said = json.loads(json.dumps(statistics.to_dict()))
    assert said["acceptance_length"] == 2.0 and said["accepted_per_step"] == 1.0
    assert said["sources"] == {"a": {"num_drafted": 6, "num_accepted": 1}, "b": {"num_drafted": 4, "num_accepted": 1}}
    assert said["depths"]["acceptance"] == [1 / 2, 1.0, 0.0]
    model = said["model"]
    assert model["alpha"] == 2 / 3 and model["gamma"] == 3.0 and model["timed_levels"] == 3
    assert model["expected_tokens_per_step"] == expected_tokens(2 / 3, 3)
    assert model["c"] == pytest.approx(0.1 / 3.0)
    assert model["expected_gain"] == walltime_gain(2 / 3, 3, model["c"])
    assert model["realised_gain"] == pytest.approx(2.0 / (3 * model["c"] + 1))
    assert model["best_gamma"] == best_gamma(2 / 3, model["c"])


def test_gains_are_measured_against_the_plain_steps_of_the_text() -> None:
    statistics = Statistics()
    statistics.observe(Proposal.empty(), accepting([]), 1, 0.0, 9.0)  # holds the prompt
    for _ in range(3):
        statistics.observe(Proposal.chain([1, 2], "s"), accepting([1]), 2, 0.4, 3.0)
        statistics.observe(Proposal.empty(), accepting([]), 1, 0.0, 1.0)
    model = statistics.to_dict()["model"]
    assert model["verify_cost"] == pytest.approx(2.0)
    assert model["c"] == pytest.approx(0.2)
    gamma = model["gamma"]
    assert model["realised_gain"] == pytest.approx(statistics.acceptance_length / (gamma * 0.2 + 2.0))
    lost = model["lost_to_acceptance"] + model["lost_to_verification"]
    assert model["expected_gain"] - lost == pytest.approx(model["realised_gain"])
    assert model["lost_to_verification"] > 0.0


def test_proposal_cut_keeps_sources_and_q_with_their_nodes() -> None:
    whole = tree_by_hand()
    cut = whole.cut(Budget(3, 2))
    assert cut.tree.tokens.tolist() == [1, 2, 4] and cut.tree.parents.tolist() == [0, 1, 1]
    assert cut.sources == ("a", "a", "b")
    assert [int(q.ids[0]) for q in cut.q] == [1, 2, 4]
    assert whole.cut(Budget(5, 3)) is whole
    assert Proposal.empty().cut(Budget(0, 0)).tree.num_nodes == 0


def drafted_by_engine(result: EngineSpeculationResult, num_emitted: int) -> Statistics:
    statistics = Statistics()
    statistics.observe(Proposal.empty(), Acceptance((), 5, engine_speculation=result), num_emitted, 0.0, 2.0)
    return statistics


def test_each_pass_of_an_engine_that_drafts_by_itself_counts_as_a_step() -> None:
    statistics = drafted_by_engine(EngineSpeculationResult("medusa", (1, 2, 3, 4), (1, 3, 1), 20), 5)
    assert (statistics.num_steps, statistics.num_in_pass, statistics.step_lengths) == (3, 3, [1, 3, 1])
    assert statistics.sources == {"medusa": SourceCount(20, 2)} and statistics.acceptance_rate == 2 / 20
    assert statistics.to_dict()["acceptance_length"] == 5 / 3


def test_step_times_of_an_engine_that_drafts_by_itself_leave_out_all_steps_of_its_first_answer() -> None:
    result = EngineSpeculationResult("medusa", (1, 2, 3, 4), (1, 3, 1), 20)
    statistics = drafted_by_engine(result, 5)
    acceptance = Acceptance((), 5, forward_us=6000, engine_speculation=result)
    statistics.observe(Proposal.empty(), acceptance, 5, 0.0, 0.006)
    assert statistics.num_steps == 6
    assert statistics.to_dict()["step_ms"]["forward"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("num_emitted", "lengths", "num_accepted"), [(1, [1], 0), (2, [1, 1], 1), (3, [1, 2], 2), (4, [1, 3], 2)]
)
def test_passes_behind_a_stop_count_only_what_the_client_gets(
    num_emitted: int, lengths: list[int], num_accepted: int
) -> None:
    """The last token of a pass is the target's own: of a pass that is cut before it, all tokens were drafts."""
    statistics = drafted_by_engine(EngineSpeculationResult("eagle", (1, 2, 3, 4), (1, 3, 1), 20), num_emitted)
    assert (statistics.num_steps, statistics.step_lengths) == (len(lengths), lengths)
    assert statistics.num_accepted_tokens == num_accepted
