"""The growth of `auto`'s trees in native code, or the reference where that cannot be compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from native.drafts import GrowthBinding, NativeEstimates, NativeTables
from native.response_memory import NativeRecollection
from orchestrator.core.context import Context
from orchestrator.core.cost_model import CostModel
from orchestrator.core.derived import derived_once
from orchestrator.core.proposal import Budget, NativeDrafts, Proposal
from orchestrator.drafting.candidates import (
    CandidateSource,
    CorpusCandidates,
    MemoryCandidates,
    PredictionCandidates,
    TableCandidates,
    TextCandidates,
    likeliest_followers,
)
from orchestrator.drafting.corpus import native_corpus
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.drafting.growth import Growth
from orchestrator.drafting.memory import Recollection
from orchestrator.drafting.predicted import Predicted, PredictedConfig
from orchestrator.drafting.tables import Tables

#: The sources in the order of their bits.
NAMES = tuple(
    source.name
    for source in (PredictionCandidates, TextCandidates, MemoryCandidates, CorpusCandidates, TableCandidates)
)
#: The source of a node, by the bits of the sources that named it.
SOURCES = tuple("+".join(name for bit, name in enumerate(NAMES) if bits >> bit & 1) for bits in range(1 << len(NAMES)))


class NativeGrowth:
    """Does in C++ what `Growth` does.

    probabilities: (m,) float64, for each node of the last tree the probability that its whole path is accepted.
    """

    def __init__(self, estimates: NativeEstimates, dependencies: ProposerDependencies, is_chain: bool) -> None:
        tables = _native(dependencies.tables) if dependencies.tables else None
        corpus = native_corpus(dependencies.corpus) if dependencies.corpus else None
        memory = dependencies.memory if isinstance(dependencies.memory, NativeRecollection) else None
        self._growth = GrowthBinding(estimates, tables, corpus, memory, dependencies.prediction, is_chain)
        self._num_read = 0
        self.probabilities = np.empty(0)

    def begin(self, context: Context) -> None:
        """Read the text so far, which may take too long for the engine's thread."""
        if not self._num_read:
            self._num_read = context.prompt_len
            self._growth.read_prompt(context.ids[: self._num_read])
        unread, self._num_read = context.ids[self._num_read :], len(context)
        self._growth.read(unread)

    def grow(self, context: Context, budget: Budget, costs: CostModel, temperature_range: int = 0) -> Proposal:
        """Return the tree with the most expected tokens per second."""
        self.begin(context)
        limits = budget.max_nodes, budget.max_depth
        tree, names, self.probabilities = self._growth.grow(temperature_range, *limits, costs)
        return Proposal(tree, tuple(SOURCES[bits] for bits in names))

    def learn(self, tokens: Sequence[int]) -> None:
        """Compare the candidates of the last tree with the text that followed."""
        self._growth.learn(tokens)

    def native_drafts(self, limits: Budget, costs: CostModel) -> NativeDrafts:
        """Return what native code needs to grow the next trees by itself."""
        growth = self._growth
        return NativeDrafts(
            growth, limits.max_nodes, limits.max_depth, SOURCES, growth.handle, growth.next_address, costs.shared
        )

    def note_read(self, num_tokens: int) -> None:
        """Note that native code has read this many more tokens of the text, and has learnt from them."""
        self._num_read += num_tokens


def growth_of(dependencies: ProposerDependencies, is_chain: bool) -> Growth | NativeGrowth:
    """Return what grows a request's trees: native code, or the reference."""
    estimates = dependencies.estimates.native
    if estimates and not isinstance(dependencies.memory, Recollection):
        return NativeGrowth(estimates, dependencies, is_chain)
    return Growth([*sources_of(dependencies)], dependencies.estimates, is_chain)


def sources_of(dependencies: ProposerDependencies) -> Iterator[CandidateSource]:
    """Yield the sources of a request's candidates; if several name a token, the first one's evidence counts."""
    if dependencies.prediction:
        yield PredictionCandidates(Predicted(PredictedConfig(), dependencies))
    yield TextCandidates()
    if isinstance(dependencies.memory, Recollection):
        yield MemoryCandidates(dependencies.memory)
    if dependencies.corpus:
        yield CorpusCandidates(dependencies.corpus)
    if dependencies.tables:
        yield TableCandidates(dependencies.tables)


@derived_once
def _native(tables: Tables) -> NativeTables:
    return NativeTables(likeliest_followers(tables), tables.vocabulary.size)
