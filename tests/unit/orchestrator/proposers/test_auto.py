"""`auto` on texts that are known beforehand, with a target whose passes cost what a formula says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from orchestrator.core.context import Context
from orchestrator.core.proposal import Budget, Proposal, Proposer
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.step_costs import StepCosts
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance
from orchestrator.proposers.auto import Auto, AutoConfig, Ledger, path_chances
from orchestrator.proposers.estimates import AcceptanceEstimates
from orchestrator.proposers.registry import select_method
from orchestrator.sampling.accept import accept_coupled
from tests.support.decode import dependencies

VOCAB = 1000
FIXED = ("none", "prompt_lookup", "suffix")

#: Seconds of a pass by its rows, in plain passes.
SURFACES: dict[str, Callable[[float], float]] = {
    "flat": lambda rows: 1.0 + 0.002 * (rows - 1),
    "linear": lambda rows: 0.6 + 0.4 * rows,
    "stairs": lambda rows: 1.0 + 0.9 * ((rows - 1) // 8),
    "mixture of experts": lambda rows: 0.3 + 0.7 * min(rows, 12) + 0.05 * max(rows - 12, 0),
}


@dataclass
class Clock:
    """A clock that moves only when it is told to."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def novel(count: int) -> list[int]:
    """A text without any repetition to draft from."""
    return np.random.default_rng(1).integers(0, VOCAB, count).tolist()


def trap(count: int) -> list[int]:
    """A text whose tokens occur again and again, but never with the same follower twice in a row."""
    rng = np.random.default_rng(2)
    return [token for _ in range(count // 2) for token in (7, int(rng.integers(8, VOCAB)))]


def repetitive(count: int) -> list[int]:
    """A text of long repeated pieces with changes in between."""
    rng = np.random.default_rng(3)
    piece = rng.integers(0, VOCAB, 60).tolist()
    text: list[int] = []
    while len(text) < count:
        text += piece[: int(rng.integers(20, 60))] + rng.integers(0, VOCAB, 3).tolist()
    return text[:count]


TEXTS = {"novel": novel, "trap": trap, "repetitive": repetitive}


def run(method: str, texts: Iterable[Sequence[int]], surface: Callable[[float], float], others: int = 0) -> float:
    """Generate texts one after the other; return tokens per plain pass. others: plain requests in each pass."""
    clock = Clock()
    shared = replace(dependencies(), step_costs=StepCosts(clock))
    tokens = 0
    for ids in texts:
        proposer = select_method(method, "", frozenset(), {}).proposer(shared)
        tokens += len(ids) - generate(proposer, ids, clock, surface, others)
    return tokens / clock.now_s * surface(1)


def generate(
    proposer: Proposer, ids: Sequence[int], clock: Clock, surface: Callable[[float], float], others: int
) -> int:
    """Run the loop's steps with a target that generates `ids`; return how many of them were the prompt."""
    context = Context(ids[:40])
    while len(context) < len(ids):
        budget = Budget(48, len(ids) - len(context) - 1)
        proposal = proposer.propose(context, Sampling(), budget).cut(budget)
        clock.now_s += surface(proposal.tree.num_nodes + 1 + others)
        target_tokens = [ids[len(context) + depth] for depth in proposal.tree.depths.tolist()]
        acceptance = Acceptance(*accept_coupled(proposal.tree, target_tokens), num_in_pass=1 + others)
        context.commit(acceptance.tokens(proposal.tree))
        proposer.observe(proposal.tree, acceptance)
    return 40


@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("text", ["novel", "trap"])
def test_auto_is_never_slower_than_plain_where_nothing_can_be_drafted(surface: str, text: str) -> None:
    texts = [TEXTS[text](1500)]
    assert run("auto", texts, SURFACES[surface]) >= 0.98 * run("none", texts, SURFACES[surface])


@pytest.mark.parametrize("surface", SURFACES)
def test_auto_reaches_the_best_fixed_method_on_a_text_that_stays_the_same(surface: str) -> None:
    texts = [repetitive(1500)]
    best = max(run(method, texts, SURFACES[surface]) for method in FIXED)
    assert run("auto", texts, SURFACES[surface]) >= 0.95 * best


@pytest.mark.parametrize("surface", ["linear", "mixture of experts"])
def test_auto_beats_every_fixed_method_when_the_text_switches(surface: str) -> None:
    texts = [part for seed in range(3) for part in (trap(600), repetitive(900 + seed))]
    best = max(run(method, texts, SURFACES[surface]) for method in FIXED)
    assert run("auto", texts, SURFACES[surface]) > best


def test_auto_sends_fewer_nodes_where_rows_cost_more() -> None:
    def mean_nodes(surface: str) -> float:
        clock = Clock()
        proposer = select_method("auto", "", frozenset(), {}).proposer(
            replace(dependencies(), step_costs=StepCosts(clock))
        )
        seen = []
        propose = proposer.propose

        def counted(context: Context, sampling: Sampling, budget: Budget) -> Proposal:
            proposal = propose(context, sampling, budget)
            seen.append(proposal.tree.num_nodes)
            return proposal

        proposer.propose = counted  # type: ignore[method-assign]
        generate(proposer, repetitive(1500), clock, SURFACES[surface], 0)
        return float(np.mean(seen))

    assert mean_nodes("linear") < 0.7 * mean_nodes("flat")


def test_a_proposal_is_cut_as_the_brute_force_best_subtree() -> None:
    clock, rng = Clock(), np.random.default_rng(0)
    estimates = AcceptanceEstimates()
    tree = TokenTree(np.arange(8, dtype=np.int32), np.array([0, 0, 1, 1, 2, 3, 3, 5], np.int32))
    proposal = Proposal.of(tree, "x", tuple(range(8)))
    for kind in range(8):
        for _ in range(40):
            estimates.observe(("x", kind), bool(rng.random() < 0.2 + 0.1 * kind))
    costs = StepCosts(clock)
    for rows in range(1, 10):
        for _ in range(300):
            costs.observe(rows, 1, 1, 0.8 + 0.2 * rows)
    auto = Auto(AutoConfig(), replace(dependencies(), step_costs=costs, estimates=estimates))
    auto._tokens, auto._seconds = 3.0, 1.5

    found = auto._cut(proposal, 0.1, costs.seconds(9))

    chances, seconds = path_chances(proposal, auto._estimates), costs.seconds(9)
    best = max(chances[list(nodes)].sum() - 2.0 * (seconds[len(nodes)] - seconds[0] + 0.1) for nodes in subtrees(tree))
    assert found.value == pytest.approx(best)
    assert 0 < found.proposal.tree.num_nodes < 8


def subtrees(tree: TokenTree) -> list[tuple[int, ...]]:
    """All sets of nodes that are not empty, as indices, that hold the parent of each of their nodes."""
    found = []
    for bits in range(1 << tree.num_nodes):
        nodes = [i for i in range(tree.num_nodes) if bits >> i & 1]
        if nodes and all(tree.parents[i] == 0 or bits >> (tree.parents[i] - 1) & 1 for i in nodes):
            found.append(tuple(nodes))
    return found


def test_estimates_follow_the_newest_outcomes_and_start_from_the_deployments() -> None:
    shared = AcceptanceEstimates()
    first = AcceptanceEstimates(shared)
    for _ in range(200):
        first.observe("kind", True)
    assert first.probability("kind") > 0.9
    assert AcceptanceEstimates(shared).probability("kind") == pytest.approx(shared.probability("kind"))
    for _ in range(200):
        first.observe("kind", False)
    assert first.probability("kind") < 0.2


def test_a_ledger_in_debt_pauses_and_pauses_longer_the_next_time() -> None:
    ledger, pauses = Ledger(), []
    for _ in range(400):
        was = ledger.is_pausing
        ledger.observe(1, 1.0 if was else 2.0, 1.0)
        pauses.append(ledger.is_pausing)
    lengths = [len(part) for part in "".join("x" if p else " " for p in pauses).split()]
    assert len(lengths) >= 3
    assert lengths[1] > lengths[0]
    assert lengths[2] > lengths[1]


def test_costs_are_interpolated_between_what_was_measured_and_never_fall() -> None:
    costs = StepCosts(Clock())
    assert costs.seconds(3) == []
    for _ in range(400):
        costs.observe(1, 1, 1, 1.0)
        costs.observe(5, 1, 1, 3.0)
        costs.observe(9, 1, 1, 2.0)
    assert costs.seconds(5) == pytest.approx([1.0, 1.5, 2.0, 2.5, 3.0], abs=0.01)
    assert costs.seconds(9)[-1] >= costs.seconds(5)[-1]
