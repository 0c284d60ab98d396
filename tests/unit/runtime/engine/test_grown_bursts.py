"""Bursts in which the trees of several sequences grow together: the trees of the reference, and the same text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from orchestrator.core.context import Context
from orchestrator.core.cost_model import Curve, SharedCosts
from orchestrator.core.proposal import Budget, NativeDrafts
from orchestrator.drafting.estimates import AcceptanceEstimates
from orchestrator.drafting.growth import Growth
from orchestrator.drafting.joint_growth import grow_jointly, joint_costs
from orchestrator.drafting.native_growth import SOURCES, NativeGrowth, sources_of
from runtime.engine.target import TargetEngine
from tests.support.decode import dependencies
from tests.support.engines import make_paged
from tests.unit.runtime.engine.test_bursts import MAX_STEPS, Sequence, suffix_drafts
from tests.unit.runtime.engine.test_runs import PROMPT

MAX_TOKENS, MAX_NODES, MEAN_TOKENS = 60, 12, 1.5
#: What the context of each sequence adds to a pass for its root, and for each node.
CONTEXT_S = ((0.01, 0.0), (0.02, 0.002))
ROWS = np.arange(1.0, 41.0)
CURVES = {
    "stairs of 4": Curve(ROWS, 1.0 + 0.2 * ((ROWS - 1) // 4), 0.1),
    "more than 7 rows are dear": Curve(ROWS, 1.0 + 0.001 * ROWS + 2.0 * (ROWS > 7), 0.001),
    "flat": Curve(ROWS, 1.0 + 0.001 * ROWS, 0.001),
}


@pytest.fixture(scope="module")
def folder(native_folder: Path) -> Path:
    return native_folder


@pytest.mark.parametrize("has_other", [False, True])
@pytest.mark.parametrize("name", CURVES)
def test_the_trees_of_a_burst_are_those_of_the_reference(folder: Path, name: str, has_other: bool) -> None:
    """has_other: beside a sequence whose method does not size its trees by costs."""
    engine, curve = TargetEngine(make_paged(folder, "float32", kernels="native")), CURVES[name]
    given = replace(dependencies(), estimates=AcceptanceEstimates())
    assert given.estimates.native
    prompts, drafts, references = [PROMPT, PROMPT[2:]], list[NativeDrafts](), list[Growth]()
    for root_s, node_s in CONTEXT_S:
        growth = NativeGrowth(given.estimates.native, given, is_chain=False)
        costs = SharedCosts(curve, root_s, node_s, MEAN_TOKENS)
        handles = growth._growth.handle, growth._growth.next_address
        drafts.append(NativeDrafts(growth, MAX_NODES, 9, SOURCES, *handles, costs))
        references.append(Growth([*sources_of(given)], given.estimates))
    sequences = [Sequence(engine, number, Context(prompt)) for number, prompt in enumerate(prompts)]
    calls = []
    for sequence, each, reference in zip(sequences, drafts, references, strict=True):
        call = sequence.several(each, max_tokens=MAX_TOKENS)
        for growth in (each.owner, reference):
            assert isinstance(growth, NativeGrowth | Growth)
            growth.grow(sequence.context, Budget(0, 0), joint_costs(curve, 0.0, 1, 1, 1.0, 0))
        calls.append(call)
    other = Sequence(engine, len(sequences))
    if has_other:
        calls.append(other.several(suffix_drafts(), max_tokens=MAX_TOKENS))
    assert engine.advance(calls) == []
    count, num_nodes = len(calls), 0
    assert len(sequences[0].steps) == MAX_STEPS
    for number in range(MAX_STEPS - 1):
        budgets = []
        for sequence, reference in zip(sequences, references, strict=True):
            tokens = sequence.steps[number].tokens
            reference.learn(tokens)
            sequence.context.commit(tokens)
            num_left = MAX_TOKENS - sum(step.acceptance.num_tokens for step in sequence.steps[: number + 1])
            budgets.append(Budget(MAX_NODES, min(9, num_left - 1)))
        for sequence, reference, budget in zip(sequences, references, budgets, strict=True):
            reference.begin_tree(sequence.context, budget)
        num_rows = count + (other.steps[number + 1].proposal.tree.num_nodes if has_other else 0)
        contexts_s = sum(root_s for root_s, _ in CONTEXT_S)
        tokens_s = 2.0 + (MEAN_TOKENS if has_other else 0.0)
        model = joint_costs(curve, contexts_s, count, num_rows, tokens_s, 2 * MAX_NODES)
        sizes = grow_jointly(references, [node_s for _, node_s in CONTEXT_S], model)
        for sequence, reference, size in zip(sequences, references, sizes, strict=True):
            expected, found = reference.sent(size), sequence.steps[number + 1].proposal
            assert found.tree.tokens.tolist() == expected.tree.tokens.tolist()
            assert found.tree.parents.tolist() == expected.tree.parents.tolist()
            assert found.sources == expected.sources
            num_nodes += size
    assert num_nodes > 5
