"""The method `auto`: at every step the token tree that promises the most tokens per second, or no draft."""

from __future__ import annotations

from typing import Self

from pydantic import Field

from native.drafts import GrowthBinding
from orchestrator.core.context import Context
from orchestrator.core.proposal import Budget, Proposal
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import MAX_NODES
from orchestrator.drafting.corpus import native_corpus
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.drafting.lookup import NativeMethod
from orchestrator.drafting.parameters import MethodConfig
from orchestrator.drafting.tables import native_tables

#: The sources of candidates in the order of their bits (candidates.h).
NAMES = ("predicted", "suffix", "memory", "corpus", "ngram")
#: The source of a node, by the bits of the sources that named it.
SOURCES = tuple("+".join(name for bit, name in enumerate(NAMES) if bits >> bit & 1) for bits in range(1 << len(NAMES)))
#: Width of a range of temperatures, and the number of ranges above 0.
RANGE_WIDTH, NUM_RANGES = 0.4, 4


class AutoConfig(MethodConfig):
    """max_nodes, draft_len: maximum draft nodes of a tree and of a path; fewer are sent where more would not pay.

    tree: trees, not only chains; unless the request sets it, a rule or an engine that takes no trees gets chains.
    """

    max_nodes: int = Field(48, ge=0, le=MAX_NODES)
    draft_len: int = Field(MAX_NODES, ge=1, le=MAX_NODES)
    tree: bool = True

    @property
    def is_chain(self) -> bool:
        """True when every draft is one path."""
        return not self.tree

    def as_chain(self) -> Self:
        """Return the parameters for chains only, unless the request sets `tree`."""
        return self if "tree" in self.model_fields_set else self.model_copy(update={"tree": False})


class Auto(NativeMethod):
    """Grows one tree from all sources of this process, as large as pays off; often it drafts nothing.

    The expected tokens E of a step are 1 + the sum of the path probabilities of the nodes that are sent. The tree
    maximises the rate of the batch, (E + tokens of the other requests) ÷ seconds of the pass.
    Invariant: whether and how much is drafted depends only on what was known before the step's draw, so every
    acceptance rule keeps its distribution.
    Source: size by goodput, TurboSpec (arXiv:2406.14066); learning from drafts that were not sent, HedgeSpec
    (arXiv:2510.20064); docs/methods/auto.md.
    """

    is_sized = True

    def __init__(self, config: AutoConfig, dependencies: ProposerDependencies) -> None:
        tables = native_tables(dependencies.tables) if dependencies.tables else None
        corpus = native_corpus(dependencies.corpus) if dependencies.corpus else None
        self._growth = GrowthBinding(
            dependencies.estimates, tables, corpus, dependencies.memory, dependencies.prediction, config.is_chain
        )
        super().__init__("auto", SOURCES, self._growth, config.max_nodes)
        self._limits, self._costs = Budget(config.max_nodes, config.draft_len), dependencies.step_costs

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return the best tree, or a bare root."""
        if not self._num_read:
            self._num_read = context.prompt_len
            self._growth.read_prompt(context.ids[: context.prompt_len])
        self._growth.size_by(*self._costs.of(len(context)), range_of(sampling))
        return super().propose(context, sampling, budget.within(self._limits))


def range_of(sampling: Sampling) -> int:
    """Return the range of temperatures within which requests share the counts: 0 for greedy ones.

    A sampled text repeats itself far less often than a greedy one, so the counts of one say little about the other.
    """
    return 0 if sampling.greedy else 1 + min(int(sampling.temperature / RANGE_WIDTH), NUM_RANGES - 1)
