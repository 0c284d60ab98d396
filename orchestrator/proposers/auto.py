"""The method `auto`: at every step the token tree that promises the most tokens per second, or no draft."""

from __future__ import annotations

from typing import Self

from pydantic import Field

from orchestrator.core.context import Context
from orchestrator.core.proposal import Budget, Proposal, Proposer
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import MAX_NODES, TokenTree
from orchestrator.core.types import Acceptance
from orchestrator.proposers.compiled_growth import growth_of
from orchestrator.proposers.dependencies import ProposerDependencies
from orchestrator.proposers.estimates import range_of
from orchestrator.proposers.ledger import Meter
from orchestrator.proposers.parameters import MethodConfig

#: Weight of all earlier measurements in the mean time of a node.
DISCOUNT = 0.9


class AutoConfig(MethodConfig):
    """max_nodes, draft_len: most draft nodes of a tree and of a path in it; fewer are sent where more would not pay.

    tree: trees, or chains alone; a rule or an engine that takes no trees gets chains if the request does not set it.
    """

    max_nodes: int = Field(48, ge=0, le=MAX_NODES)
    draft_len: int = Field(MAX_NODES, ge=1, le=MAX_NODES)
    tree: bool = True

    @property
    def is_chain(self) -> bool:
        """True when every draft is one path."""
        return not self.tree

    def as_chain(self) -> Self:
        """Return the parameters with chains alone, unless the request asks for trees."""
        return self if "tree" in self.model_fields_set else self.model_copy(update={"tree": False})


class Auto(Proposer):
    """Grows one tree from all that may be drafted in this process, as large as it pays; often it drafts nothing.

    The expected tokens E of a step are 1 + the sum of the chances of the nodes that are sent. The tree maximises the
    rate of the batch, (E + tokens of the other requests) ÷ seconds of the pass and of drafting.
    Invariant: whether and how much is drafted depends on what was known before the step's draw, so every acceptance
    rule keeps its law.
    Source: size by goodput, TurboSpec (arXiv:2406.14066); learning from drafts that were not sent, HedgeSpec
    (arXiv:2510.20064); docs/methods/auto.md.
    """

    name = "auto"

    def __init__(self, config: AutoConfig, dependencies: ProposerDependencies) -> None:
        self._most = Budget(config.max_nodes, config.draft_len)
        self._growth = growth_of(dependencies, config.is_chain)
        self._meter = Meter(dependencies.step_costs)
        self._node_s = 0.0

    @property
    def num_plain(self) -> int:
        """Return how many proposals are bare roots: while drafts pause, that is known beforehand."""
        return self._meter.num_plain

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return the best tree, or a bare root."""
        proposal = Proposal.empty()
        if surface := self._meter.begin():
            budget = budget.within(self._most)
            proposal = self._growth.grow(context, budget, surface, self._node_s, range_of(sampling))
        self._meter.sent(proposal, may_rest=True)
        if not self._meter.is_first:
            node_s = self._meter.draft_s / (proposal.tree.num_nodes + 1)
            self._node_s = DISCOUNT * self._node_s + (1 - DISCOUNT) * node_s
        return proposal

    def observe(self, tree: TokenTree, acceptance: Acceptance) -> None:
        """Learn what the step cost, and how far the candidates agree with the text."""
        self._growth.learn(acceptance.tokens(tree))
        self._meter.answered(tree, acceptance)
