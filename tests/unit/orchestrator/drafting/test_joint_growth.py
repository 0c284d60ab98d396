"""Trees that grow together: the best cut through the nodes of all requests, and the same in native code."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from ctypes import c_int32
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from native.drafts_library import CurveFields, JointTreeFields, SharedPassFields, TreeFields
from orchestrator.core.context import Context
from orchestrator.core.cost_model import Curve, least_slopes
from orchestrator.core.proposal import Budget, Proposal
from orchestrator.core.tree import TokenTree
from orchestrator.drafting.candidates import Candidate
from orchestrator.drafting.estimates import AcceptanceEstimates
from orchestrator.drafting.growth import Growth
from orchestrator.drafting.joint_growth import MARGIN, grow_jointly, joint_costs
from orchestrator.drafting.native_growth import SOURCES, NativeGrowth, sources_of
from tests.support.replays import COSTS
from tests.unit.orchestrator.drafting.test_auto import Drawn, Named, continuations
from tests.unit.orchestrator.drafting.test_native_growth import cases, text_of

DEPTH = 2
STAIRS: dict[str, Callable[[float], float]] = {
    "stairs of 2": lambda rows: 1.0 + 0.5 * ((rows - 1) // 2),
    "stairs of 5": lambda rows: 1.0 + 1.5 * ((rows - 1) // 5),
    "one step": lambda rows: 1.0 + 3.0 * (rows > 6),
}


def curve_of(cost: Callable[[float], float]) -> Curve:
    """The curve through the costs of 1 to 200 rows."""
    rows = np.arange(1.0, 201.0)
    return Curve(rows, np.array([cost(number) for number in rows.tolist()]), 0.1)


def grown(
    growths: Sequence[Growth], contexts: Sequence[Context], curve: Curve, node_s: Sequence[float], max_nodes: int = 20
) -> list[Proposal]:
    """The trees of requests whose trees grow together, beside no others."""
    count = len(growths)
    for growth, context in zip(growths, contexts, strict=True):
        growth.begin_tree(context, Budget(max_nodes, DEPTH))
    costs = joint_costs(curve, 0.0, count, count, float(count), count * max_nodes)
    sizes = grow_jointly(growths, node_s, costs)
    return [growth.sent(size) for growth, size in zip(growths, sizes, strict=True)]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("cost", [*COSTS, *STAIRS])
@pytest.mark.parametrize("seed", range(20))
def test_no_trees_of_the_candidates_have_a_higher_rate(cost: str, seed: int, count: int) -> None:
    """All combinations of the likeliest nodes of each request are tried."""
    curve, sources = curve_of((COSTS | STAIRS)[cost]), [Drawn(100 * count + 10 * seed + i) for i in range(count)]
    probabilities = [dict(continuations(source, DEPTH)) for source in sources]
    best = [sorted(each.values(), reverse=True) for each in probabilities]

    def rate(num_nodes: int, expected: float) -> float:
        return (count + expected) / float(curve.at(np.array(float(count + num_nodes))))

    combinations = itertools.product(*(range(len(each) + 1) for each in best))
    rates = [
        rate(sum(sizes), sum(sum(each[:n]) for each, n in zip(best, sizes, strict=True))) for sizes in combinations
    ]

    growths = [Growth([source], AcceptanceEstimates()) for source in sources]
    trees = [each.tree for each in grown(growths, [Context([1])] * count, curve, [0.0] * count)]
    expected = sum(each[path] for each, tree in zip(probabilities, trees, strict=True) for path in tree.paths[1:])
    num_nodes = sum(tree.num_nodes for tree in trees)
    assert bool(num_nodes) == (max(rates) > (1 + MARGIN) * rate(0, 0.0))
    assert not num_nodes or rate(num_nodes, expected) == pytest.approx(max(rates))


def test_nodes_whose_context_costs_more_must_be_likelier() -> None:
    """The context of the second request makes all its nodes too dear, or the less likely ones."""
    source, curve = Named([Candidate(1, 900), Candidate(2, 100)]), curve_of(lambda rows: 1.0 + 0.01 * (rows - 1))
    sizes = []
    for node_s in (0.0, 0.2, 2.0):
        growths = [Growth([source], AcceptanceEstimates()) for _ in range(2)]
        sizes.append([each.tree.num_nodes for each in grown(growths, [Context([1])] * 2, curve, [0.0, node_s])])
    (same, other), (first, fewer), (last, none) = sizes
    assert same == other and min(first, last) >= same and same > fewer > none == 0


def test_the_rate_to_beat_is_that_without_any_draft_or_with_those_of_the_others_alone() -> None:
    curve = curve_of(lambda rows: rows)
    assert joint_costs(curve, 1.0, 2, 2, 2.0, 0).rate_to_beat == pytest.approx(2 / 3)
    assert joint_costs(curve, 0.0, 2, 4, 6.0, 3).rate_to_beat == pytest.approx(6 / 4)
    costs = joint_costs(curve, 0.0, 2, 4, 2.5, 3)
    assert costs.rate_to_beat == pytest.approx(1.0) and costs.seconds.tolist() == [4, 5, 6, 7]
    assert costs.others_tokens == 1.5 and costs.row_s.tolist() == least_slopes(costs.seconds).tolist()


class Drafted(NamedTuple):
    """What native code has written for a request."""

    tree: TokenTree
    sources: tuple[str, ...]
    probabilities: list[float]


def natively(
    growths: Sequence[NativeGrowth],
    committed: Sequence[Sequence[int]],
    pass_fields: SharedPassFields,
    node_s: Sequence[float],
    budgets: Sequence[Budget],
) -> list[Drafted]:
    """Let native code learn the committed tokens, and grow the trees after them."""
    library: Any = growths[0]._growth._library
    joint_trees, arrays = (JointTreeFields * len(growths))(), []
    for fields, growth, tokens, seconds, budget in zip(joint_trees, growths, committed, node_s, budgets, strict=True):
        room, read = budget.max_nodes, (c_int32 * len(tokens))(*tokens)
        nodes, probabilities = np.zeros((3, room), np.int32), np.zeros(room)
        arrays.append((nodes, probabilities, read))
        fields.growth, fields.committed, fields.num_committed = growth._growth.handle, ctypes.addressof(read), len(read)
        fields.tree = TreeFields(*(row.ctypes.data for row in nodes), probabilities.ctypes.data)
        fields.context_row_s, fields.max_nodes, fields.max_depth = seconds, budget.max_nodes, budget.max_depth
    assert library.drafts_grow_jointly(joint_trees, len(growths), pass_fields) is None
    drafted = []
    for fields, (nodes, probabilities, _) in zip(joint_trees, arrays, strict=True):
        tokens, parents, names = nodes[:, : fields.num_nodes].copy()
        sources = tuple(SOURCES[bits] for bits in names.tolist())
        drafted.append(Drafted(TokenTree(tokens, parents), sources, probabilities[: fields.num_nodes].tolist()))
    return drafted


@pytest.mark.parametrize("number", range(8))
def test_native_trees_are_those_of_the_reference(number: int) -> None:
    rng, given = np.random.default_rng(number), [*cases()][number]
    assert given.estimates.native
    given, count = replace(given, estimates=AcceptanceEstimates()), 1 + number % 4
    base = curve_of([*COSTS.values(), *STAIRS.values()][number % 7])
    every = slice(None, None, 1 + number)  # so that costs are interpolated
    curve = Curve(base.rows[every].copy(), base.seconds[every].copy(), 0.05)
    estimates = given.estimates.native
    natives = [NativeGrowth(estimates, given, number % 3 == 1) for _ in range(count)]
    references = [Growth([*sources_of(given)], given.estimates, number % 3 == 1) for _ in range(count)]
    texts = [text_of(rng, 150) for _ in range(count)]
    contexts, num_nodes = [Context(text[:10]) for text in texts], 0
    for native, reference, context in zip(natives, references, contexts, strict=True):
        for each in (native, reference):
            each.grow(context, Budget(0, 0), joint_costs(curve, 0.0, 1, 1, 1.0, 0))
    while all(len(context) + 8 < 150 for context in contexts):
        came = [
            text[len(context) : len(context) + int(rng.integers(1, 6))]
            for text, context in zip(texts, contexts, strict=True)
        ]
        budgets = [Budget(int(rng.integers(0, 41)), int(rng.integers(0, 12))) for _ in range(count)]
        node_s = (rng.integers(0, 2) * 0.05 * rng.random(count)).tolist()
        beside, extra_rows, tokens = int(rng.integers(0, 3)), int(rng.integers(0, 9)), float(count + rng.random() * 3)
        shape = (float(rng.random()), count + beside, count + beside + extra_rows, tokens)
        pass_fields = SharedPassFields(CurveFields.of(curve), shape[0], tokens, *shape[1:3])
        found = natively(natives, came, pass_fields, node_s, budgets)
        for reference, context, tokens_of in zip(references, contexts, came, strict=True):
            reference.learn(tokens_of)
            context.commit(tokens_of)
        for reference, context, budget in zip(references, contexts, budgets, strict=True):
            reference.begin_tree(context, budget)
        sizes = grow_jointly(
            references, node_s, joint_costs(curve, *shape, sum(budget.max_nodes for budget in budgets))
        )
        for drafted, reference, size in zip(found, references, sizes, strict=True):
            expected = reference.sent(size)
            assert drafted.tree.tokens.tolist() == expected.tree.tokens.tolist()
            assert drafted.tree.parents.tolist() == expected.tree.parents.tolist()
            assert drafted.sources == expected.sources
            assert drafted.probabilities == pytest.approx(reference.probabilities.tolist())
            num_nodes += size
    assert num_nodes > 40
