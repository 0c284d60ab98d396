"""`auto` on texts that are known beforehand: what it sends, what it learns, and where it drafts nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from native.drafts import GrowthBinding, NativeEstimates
from orchestrator.core.context import Context
from orchestrator.core.costs import PassCosts
from orchestrator.core.proposal import Budget, Proposal, Proposer
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.types import Acceptance, PassLoad
from orchestrator.drafting.auto import range_of
from orchestrator.drafting.costs import StepCosts
from orchestrator.drafting.registry import select_method
from tests.support.decode import dependencies, observe
from tests.unit.orchestrator.drafting.test_corpus import corpus_of

WIDE = Budget(128, 128)
FLAT, STAIRS, LINEAR = (
    lambda rows: 1.0 + 0.001 * rows,
    lambda rows: 1.0 + 0.3 * ((rows - 1) // 4),
    lambda rows: 0.8 + 0.2 * rows,
)
CYCLE = [*range(10, 22)]


def costs_of(cost: Callable[[int], float]) -> StepCosts:
    """The costs of passes that take cost(rows) seconds."""
    rows = range(1, 130)
    return StepCosts(PassCosts.measured([*rows], np.array([cost(number) for number in rows])))


def auto(cost: Callable[[int], float] = FLAT, config: str = "", **given: object) -> Proposer:
    own = {"estimates": NativeEstimates(), **given}
    return select_method("auto", config, frozenset(), {}).proposer(
        replace(dependencies(), step_costs=costs_of(cost), **own)  # type: ignore[arg-type]
    )


def generate(proposer: Proposer, text: list[int], cost: Callable[[int], float]) -> tuple[float, list[int]]:
    """Return the seconds that a text takes, as a target takes them that says just that, and the sizes of the trees."""
    context, seconds, sizes = Context(text[:4]), 0.0, list[int]()
    while len(context) < len(text):
        rest = text[len(context) :]
        tree = proposer.propose(context, Sampling(), Budget(128, len(rest) - 1)).tree
        path, node = list[int](), 0
        while len(path) < len(rest) and (node := tree.children[node].get(rest[len(path)], 0)):
            path.append(node)
        rows = tree.num_nodes + 1
        load = PassLoad(rows, 1, rows, len(path) + 1, num_kv_tokens=len(context))
        acceptance = Acceptance(tuple(path), rest[len(path)], forward_us=int(1e6 * cost(rows)), load=load)
        context.commit(acceptance.tokens(tree))
        observe(proposer, tree, acceptance)
        seconds += cost(rows)
        sizes.append(tree.num_nodes)
    return seconds, sizes


@pytest.mark.parametrize("cost", [FLAT, STAIRS, LINEAR], ids=["flat", "stairs", "linear"])
def test_a_text_that_repeats_itself_is_drafted_and_one_that_does_not_costs_next_to_nothing(
    cost: Callable[[int], float],
) -> None:
    plain_s = 600 * cost(1)
    assert generate(auto(cost), CYCLE * 50, cost)[0] < 0.75 * plain_s
    rng = np.random.default_rng(0)
    assert generate(auto(cost), rng.integers(0, 9, 600).tolist(), cost)[0] < 1.04 * plain_s


def test_trees_are_smaller_where_rows_cost_more() -> None:
    rng = np.random.default_rng(1)
    text = [token for _ in range(60) for token in (*CYCLE[: rng.integers(3, 12)], int(rng.integers(0, 9)))]
    sizes = {cost: np.mean(generate(auto(cost), text, cost)[1]) for cost in (FLAT, LINEAR)}
    assert 0 < sizes[LINEAR] < 0.7 * sizes[FLAT]


def propose(proposer: Proposer, ids: list[int], budget: Budget = WIDE) -> Proposal:
    return proposer.propose(Context(ids), Sampling(), budget)


def test_a_tree_has_what_followed_the_longest_suffix_and_the_next_shorter_one() -> None:
    tree = propose(auto(), [7, 1, 2, 3, 8, 8, 2, 4, 9, 1, 2], Budget(2, 1)).tree
    assert tree.paths[1:] == [(3,), (4,)]


def test_trees_keep_to_the_budget_and_are_chains_where_a_rule_needs_them() -> None:
    ids = [*CYCLE, 1, *CYCLE, 2, *CYCLE]
    for budget in (Budget(0, 5), Budget(5, 0), Budget(3, 9), Budget(40, 2)):
        tree = propose(auto(), ids, budget).tree
        assert tree.num_nodes <= budget.max_nodes and tree.depths.max() <= budget.max_depth
    forked = [7, 1, 2, 3, 8, 8, 2, 4, 9, 1, 2]
    assert not propose(auto(), forked).tree.is_chain
    assert propose(auto(config='{"tree": false}'), forked).tree.is_chain
    assert propose(auto(config='{"max_nodes": 3}'), ids).tree.num_nodes == 3


def test_every_source_that_names_a_token_is_named() -> None:
    proposal = propose(auto(prediction=(1, 2), corpus=corpus_of([[5, 1, 2]])), [5, 1, 2, 5])
    assert proposal.sources[0] == "predicted+suffix+corpus"


def test_drafts_end_where_the_text_never_follows_them() -> None:
    """After 1 comes another token than ever before."""
    text = [token for number in range(150) for token in (1, 100 + number)]
    sizes = generate(auto(LINEAR), text, LINEAR)[1]
    assert sum(sizes[-50:]) < sum(sizes[:50]) / 4


def test_greedy_and_sampled_requests_teach_each_other_nothing() -> None:
    ranges = [range_of(Sampling(temperature)) for temperature in (0.0, 0.2, 0.5, 0.8, 1.0, 1.5, 9.0)]
    assert ranges == [0, 1, 2, 3, 3, 4, 4]
    estimates, ids = NativeEstimates(), [1, 2, 3, 1, 2]
    for _ in range(60):  # greedy texts that do not go on as they did before
        context, proposer = Context(ids), auto(LINEAR, estimates=estimates)
        observe(proposer, proposer.propose(context, Sampling(), WIDE).tree, Acceptance((), 9))
        context.commit([9])
        proposer.propose(context, Sampling(), WIDE)
    drafted = [
        auto(LINEAR, estimates=estimates).propose(Context(ids), Sampling(temperature), WIDE).tree.num_nodes > 0
        for temperature in (0.0, 0.8)
    ]
    assert drafted == [False, True]


def test_text_read_in_pieces_gives_the_same_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    text = CYCLE * 8
    whole = propose(auto(), text).tree.paths
    monkeypatch.setattr("native.drafts.PIECE", 7)
    assert propose(auto(), text).tree.paths == whole


def test_the_prompt_is_read_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later proposals are made on the engine's thread, where a long prompt would use up the proposer's time limit."""
    read: list[list[int]] = []
    monkeypatch.setattr(GrowthBinding, "read_prompt", lambda _, tokens: read.append([*tokens]))
    proposer, context = auto(), Context([*range(50)])
    for _ in range(3):
        proposer.propose(context, Sampling(), Budget(8, 8))
        context.commit([7])
    assert read == [[*range(50)]]
