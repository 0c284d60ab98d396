"""Drafts as long as pays: a wrapper around a method's proposer, for "auto" as draft_len or max_nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from orchestrator.core.arrays import FloatArray, IdArray
from orchestrator.core.context import Context
from orchestrator.core.proposal import Budget, NativeDrafts, Proposal, Proposer, Step
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import StepOptions
from orchestrator.drafting.costs import RowCosts, StepCosts

#: Outcomes lose this fraction of their weight with every step, so that a method that did not pay is tried again.
FADE = 0.02
#: The probability of a first child, and of its siblings, before any outcome, which weighs as much as PRIOR_WEIGHT
#: outcomes: optimistic, so that drafts are tried.
PRIOR, PRIOR_OF_SIBLINGS, PRIOR_WEIGHT = 0.8, 0.2, 4.0
#: The weight of a new draft in the time that a level takes.
LEVEL_WEIGHT = 0.2
#: Plain steps that may run together after a step for which no draft pays.
REST = 16


class Shape(NamedTuple):
    """The nodes of a tree by falling worth. probabilities: (n,) float64, of their paths. depths: (n,) int32."""

    probabilities: FloatArray
    depths: IdArray


class Sized(Proposer):
    """Gives a proposer the budget with which the batch gets the most tokens per second, drafting included.

    A node's probability is the product, along its path, of how often nodes of the same rank among their siblings were
    accepted: for a chain α, so that its length is γ*. A tree is taken to look like the last one.
    Invariant: the budget depends on earlier steps alone, so every acceptance rule keeps its distribution.
    Source: γ from α and c, Leviathan et al. 2023, arXiv:2211.17192, section 3.5, with the price of a verified row.
    """

    def __init__(self, proposer: Proposer, costs: StepCosts, num_levels: int, is_chain: bool) -> None:
        """num_levels: of a chain, at most."""
        self.name = proposer.name
        self._proposer, self._costs, self._num_levels, self._is_chain = proposer, costs, num_levels, is_chain
        self._outcomes: dict[int, tuple[float, float]] = {}  # rank → accepted, tested
        self._last = TokenTree.bare()
        self._level_s, self._is_first, self._rests = 0.0, True, False
        self._budget: Budget | None = None

    @property
    def needs(self) -> StepOptions:
        """What the proposer needs from the step; nothing while no draft pays."""
        return StepOptions() if self._rests else self._proposer.needs

    @property
    def native_drafts(self) -> NativeDrafts | None:
        """What makes the next proposals in native code, none of them larger than the last budget."""
        drafts, budget = self._proposer.native_drafts, self._budget
        if self._rests or not drafts or not budget:
            return None
        nodes, depth = min(drafts.max_nodes, budget.max_nodes), min(drafts.max_depth, budget.max_depth)
        return drafts._replace(max_nodes=nodes, max_depth=depth)

    def begin(self, context: Context, sampling: Sampling, budget: Budget) -> None:
        """Choose the budget, and let the proposer begin."""
        self._budget = self._paying(len(context), budget)
        if self._budget.max_nodes:
            self._proposer.begin(context, sampling, self._budget)

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return the proposer's draft, or a bare root where no draft pays."""
        self._budget = self._paying(len(context), budget)
        self._rests = not self._budget.max_nodes
        return Proposal.plain(REST) if self._rests else self._proposer.propose(context, sampling, self._budget)

    def observe(self, steps: Sequence[Step]) -> None:
        """Learn how far the drafts agree with the text, and how long a level takes."""
        self._proposer.observe(steps)
        for step in steps:
            self._outcomes = {rank: (a - FADE * a, n - FADE * n) for rank, (a, n) in self._outcomes.items()}
            if (tree := step.proposal.tree).num_nodes:
                self._last = tree
                self._count(tree, step.tokens)
                self._note_time(step.draft_s / float(tree.depths.max()))

    def close(self) -> None:
        """Free what the proposer holds."""
        self._proposer.close()

    def _paying(self, context_len: int, budget: Budget) -> Budget:
        """Return the part of a budget with the highest rate; for a tree of unknown shape, all of it."""
        limit = budget.clipped(self._num_levels)
        if not (limit and (self._is_chain or self._last.num_nodes)):
            return budget if limit else Budget(0, 0)
        shape = self._chain(limit) if self._is_chain else self._like_last()
        num_nodes = self._best(shape, self._costs.of(context_len))
        if self._is_chain:
            return Budget(num_nodes, num_nodes)
        if num_nodes == len(shape.depths):  # more might pay
            num_nodes *= 2
        return Budget(min(num_nodes, budget.max_nodes), budget.max_depth)

    def _best(self, shape: Shape, costs: RowCosts) -> int:
        """Return how many nodes of a shape, the likeliest first, give the highest rate; 0 if none beats plain steps."""
        size = min(len(shape.depths), len(costs.seconds) - 1)
        depths = np.concatenate([[0], np.maximum.accumulate(shape.depths[:size])])
        tokens = 1.0 + costs.others_tokens + np.concatenate([[0.0], shape.probabilities[:size].cumsum()])
        rates = tokens / (costs.seconds[: size + 1] + self._level_s * depths)
        best = int(rates.argmax())
        return best if rates[best] > costs.rate_to_beat else 0

    def _chain(self, length: int) -> Shape:
        return Shape(self._probability(0) ** np.arange(1.0, length + 1), np.arange(1, length + 1, dtype=np.int32))

    def _like_last(self) -> Shape:
        paths = [1.0]
        for parent, rank in zip(self._last.parents.tolist(), self._last.ranks, strict=True):
            paths.append(paths[parent] * self._probability(rank))
        probabilities = np.array(paths[1:])
        order = np.argsort(-probabilities, kind="stable")
        return Shape(probabilities[order], self._last.depths[1:][order])

    def _probability(self, rank: int) -> float:
        accepted, tested = self._outcomes.get(rank, (0.0, 0.0))
        prior = PRIOR_OF_SIBLINGS if rank else PRIOR
        return (accepted + PRIOR_WEIGHT * prior) / (tested + PRIOR_WEIGHT)

    def _count(self, tree: TokenTree, tokens: Sequence[int]) -> None:
        """Count the outcomes of all children along the text's path through the draft."""
        node = 0
        for token in tokens:
            children = tree.children[node]
            for rank, candidate in enumerate(children):
                accepted, tested = self._outcomes.get(rank, (0.0, 0.0))
                self._outcomes[rank] = accepted + (candidate == token), tested + 1.0
            if token not in children:
                return
            node = children[token]

    def _note_time(self, level_s: float) -> None:
        """Note the time of a level, but not that of the first draft, for which the proposer reads the prompt."""
        if self._is_first:
            self._is_first = False
            return
        self._level_s += (LEVEL_WEIGHT if self._level_s else 1.0) * (level_s - self._level_s)
