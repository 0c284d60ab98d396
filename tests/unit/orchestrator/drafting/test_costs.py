"""What a row costs in the next pass, and drafts that are as long as pays."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.core.context import Context
from orchestrator.core.costs import PassCosts
from orchestrator.core.proposal import Budget, Proposal, Proposer, Step
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, PassLoad, StepOptions
from orchestrator.drafting.costs import RowCosts, StepCosts
from orchestrator.drafting.sized import Sized

COSTS = PassCosts(np.array([1.0, 11.0]), np.array([1.0, 3.0]), 0.5, token_s=0.001, row_token_s=0.0001)
BUDGET = Budget(128, 128)


def step(num_in_pass: int, seconds: float, *, rows: int = 1, kv_tokens: int = 0) -> Step:
    """A plain step of one of several requests whose contexts have kv_tokens tokens in all."""
    load = PassLoad(rows * num_in_pass, num_in_pass, rows, 1.0, False, kv_tokens, rows * kv_tokens)
    acceptance = Acceptance((), 1, forward_us=int(1e6 * seconds), num_in_pass=num_in_pass, load=load)
    return Step(Proposal.empty(), acceptance, 0.0, seconds)


def test_the_costs_of_a_pass_are_linear_between_measurements_and_never_fall() -> None:
    costs = PassCosts.measured([1, 2, 4], np.array([1.0, 1.2, 1.1]))
    assert costs.seconds.tolist() == pytest.approx([1.0, 1.15, 1.15])
    assert COSTS.at(np.array([1.0, 6.0, 13.0])).tolist() == [1.0, 2.0, 4.0]


def test_a_lone_request_pays_for_its_rows_and_its_context() -> None:
    costs = StepCosts(COSTS).of(100)
    assert costs.seconds[:2].tolist() == pytest.approx([1.0 + 0.1 + 0.01, 1.2 + 0.1 + 0.02])
    assert (costs.others_tokens, costs.rate_to_beat) == (0.0, pytest.approx(1 / 1.11))


def test_beside_others_a_row_costs_what_it_adds_to_their_pass() -> None:
    costs = StepCosts(COSTS)
    costs.observe([step(10, 2.8)] * 300)
    found = costs.of(0)
    assert costs.num_sequences == 10 and found.others_tokens == pytest.approx(9.0, rel=1e-3)
    assert found.seconds[0] == pytest.approx(2.8, rel=1e-3)
    assert found.seconds[2] - found.seconds[1] == pytest.approx(0.5, rel=1e-3)
    assert found.rate_to_beat == pytest.approx(10 / 2.8, rel=1e-3)


def test_one_speed_scales_all_rows_and_no_single_pass_counts_for_much() -> None:
    costs = StepCosts(COSTS)
    costs.observe([step(1, 3.0)] * 200)
    assert costs.of(0).seconds[10] == pytest.approx(9.0, rel=1e-3)
    costs.observe([step(1, 1000.0)])
    assert costs.of(0).seconds[0] < 3.3


def test_passes_that_also_read_prompts_teach_nothing() -> None:
    costs = StepCosts(COSTS)
    prompt = step(7, 50.0)
    load = prompt.acceptance.load
    assert load
    atypical = Acceptance((), 1, forward_us=10**8, num_in_pass=7, load=load._replace(is_atypical=True))
    costs.observe([Step(Proposal.empty(), atypical, 0.0, 0.0)])
    assert costs.num_sequences == 1 and costs.of(0).seconds[0] == 1.0


class Linear(StepCosts):
    """A pass takes 1 s, and row_s for each node."""

    def __init__(self, row_s: float) -> None:
        super().__init__()
        self.row_s = row_s

    def of(self, context_len: int) -> RowCosts:
        return RowCosts(1.0 + self.row_s * np.arange(129), 0.0, 1.0)


class Drafter(Proposer):
    """Drafts a chain as long as it may, or a tree of three children a node."""

    name, needs = "drafter", StepOptions(target_tokens=True)

    def __init__(self, is_chain: bool) -> None:
        self._is_chain, self.observed = is_chain, 0

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        if self._is_chain:
            return Proposal.chain([1] * budget.clipped(16), self.name)
        parents = np.arange(min(budget.max_nodes, 12), dtype=np.int32) // 3
        return Proposal.of(TokenTree(1 + np.arange(len(parents), dtype=np.int32) % 3, parents), self.name)

    def observe(self, steps: list[Step]) -> None:  # type: ignore[override]
        self.observed += len(steps)


def run(sized: Sized, accepts: float, draft_s: float, num_steps: int = 200) -> list[int]:
    """Return the sizes of drafts whose first child is accepted that often, after draft_s for each level."""
    rng, context, sizes = np.random.default_rng(0), Context([1]), list[int]()
    for _ in range(num_steps):
        proposal = sized.propose(context, Sampling(), BUDGET)
        path, node = list[int](), 0
        while rng.random() < accepts and (node := next(iter(proposal.tree.children[node].values() or [0]))):
            path.append(node)
        depth = float(proposal.tree.depths.max())
        sized.observe([Step(proposal, Acceptance(tuple(path), 9), draft_s * depth, 1.0)])
        sizes.append(proposal.tree.num_nodes)
    return sizes


def best_length(alpha: float, c: float, row: float) -> int:
    """γ* as the paper has it, with the price of a row."""
    rates = [sum(alpha**i for i in range(n + 1)) / (1 + (c + row) * n) for n in range(17)]
    return int(np.argmax(rates))


@pytest.mark.parametrize(("alpha", "c", "row"), [(0.9, 0.05, 0.02), (0.7, 0.1, 0.1), (0.5, 0.2, 0.05)])
def test_a_chain_is_as_long_as_alpha_and_c_say(alpha: float, c: float, row: float) -> None:
    sizes = run(Sized(Drafter(True), Linear(row), 16, is_chain=True), alpha, c)
    assert abs(np.median(sizes[100:]) - best_length(alpha, c, row)) <= 2


def test_a_method_that_does_not_pay_rests_and_is_tried_again() -> None:
    drafter = Drafter(True)
    sized = Sized(drafter, Linear(0.05), 16, is_chain=True)
    sizes = run(sized, 0.05, 0.5, 400)
    assert np.mean(np.array(sizes[20:]) > 0) < 0.2 and any(sizes[100:])
    assert drafter.observed == 400
    resting = next(proposal for proposal in iter(lambda: sized.propose(Context([1]), Sampling(), BUDGET), None)
                   if not proposal.tree.num_nodes or sized.observe([Step(proposal, Acceptance((), 9), 9.0, 1.0)]))  # fmt: skip
    assert resting.num_plain > 1 and sized.needs == StepOptions() and sized.native_drafts is None


@pytest.mark.parametrize(("row", "least", "most"), [(0.001, 6, 12), (0.3, 1, 3)])
def test_a_tree_has_the_nodes_that_pay(row: float, least: int, most: int) -> None:
    sizes = run(Sized(Drafter(False), Linear(row), 16, is_chain=False), 0.7, 0.0)
    assert least <= np.median(sizes[100:]) <= most
