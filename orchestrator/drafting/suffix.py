"""Suffix decoding: proposes what followed the longest repeated suffix, by its statistics (Oliaro et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field

from orchestrator.core.arrays import IdArray
from orchestrator.core.context import Context
from orchestrator.core.proposal import Budget, Proposal, Proposer
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import MAX_NODES, TreeBuilder
from orchestrator.drafting.automaton import ROOT, Automaton, Match
from orchestrator.drafting.corpus import Corpus, Found
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.drafting.memory import MAX_DEPTH, Recollection
from orchestrator.drafting.parameters import MethodConfig

#: In the order of their numbers in `native/drafts/suffix.h`.
SOURCES = TEXT, MEMORY, CORPUS = "suffix.text", "suffix.memory", "suffix.corpus"


class SuffixConfig(MethodConfig):
    """max_depth: longest suffix looked up. factor: draft nodes per token of the match.

    min_prob: least estimated probability of a draft node's path. draft_len: maximum draft nodes.
    tree: the likeliest paths; false: only the chain of the most frequent followers.
    """

    max_depth: int = Field(24, ge=1, le=MAX_DEPTH)
    factor: float = Field(1.5, ge=0.0, le=MAX_NODES)
    min_prob: float = Field(0.1, ge=0.0, le=1.0)
    draft_len: int = Field(32, ge=1, le=MAX_NODES)
    tree: bool = True

    @property
    def is_chain(self) -> bool:
        """True when the draft is one path."""
        return not self.tree


class Node(NamedTuple):
    """A draft node that may be added next; a heap returns the most probable one, among equals the one found first.

    minus_prob: minus the estimated probability of its path. rank: among its siblings; no two nodes have the same parent
    and rank. at: where the nodes below it are found: a match in a text, or the rows of a corpus that continue its path.
    """

    minus_prob: float
    parent: int
    rank: int
    depth: int
    token: int
    at: Any


#: Yields the nodes below one that has been added, given the node and its number; the token of the root is meaningless.
Below = Callable[[Node, int], Iterator[Node]]


@dataclass(eq=False)
class ScoredTree:
    """A draft from one source; score: the expected number of accepted tokens, Σ estimated path probabilities."""

    source: str
    tree: TreeBuilder = field(default_factory=TreeBuilder)
    score: float = 0.0

    def add(self, node: Node) -> int:
        """Add a node and return its number."""
        self.score -= node.minus_prob
        return self.tree.add(node.parent, node.token)


class Suffix(Proposer):
    """Drafts from the request's own text, earlier responses or a corpus, whichever promises the most accepted tokens.

    A token costs O(max_depth) to index, a proposal O(max_depth + draft_len).
    Source: suffix decoding, Oliaro et al. 2024, arXiv:2411.04975; docs/methods/suffix.md.
    """

    name = "suffix"

    def __init__(self, config: SuffixConfig, dependencies: ProposerDependencies) -> None:
        self._config = config
        self._text = Automaton(config.max_depth)
        memory, self._corpus = dependencies.memory, dependencies.corpus
        self._memory = memory if isinstance(memory, Recollection) else None

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return a tree or a chain, or a bare root when the last token does not occur elsewhere."""
        self._text.extend(context.ids[self._text.num_tokens :])
        drafts = [self._draft(TEXT, budget, self._text, self._text.repeated())]
        if self._memory:
            recent = context.ids[-self._config.max_depth :]
            found = self._memory.longest(recent, partial(self._draft, MEMORY, budget))
            drafts += [found] if found else []
        if self._corpus and (found_in_corpus := self._corpus.longest(context.ids, self._config.max_depth)):
            drafts.append(self._draft_from_corpus(budget, self._corpus, found_in_corpus))
        best = max(drafts, key=lambda draft: draft.score)
        return Proposal.of(best.tree.build(), best.source)

    def _draft(self, source: str, budget: Budget, text: Automaton, match: Match) -> ScoredTree:
        """Draft from what followed a match in a text."""
        return self._grow(ScoredTree(source), budget, match.length, match, partial(self._below_match, text))

    def _draft_from_corpus(self, budget: Budget, corpus: Corpus, found: Found) -> ScoredTree:
        """Draft from what followed the places of a match in the corpus."""
        draft, budget = ScoredTree(CORPUS), Budget(budget.max_nodes, budget.clipped(self._size(found.length)))
        if not budget.max_depth:
            return draft
        rows = corpus.continuations(found, budget.max_depth)
        return self._grow(draft, budget, found.length, rows, partial(self._below_rows, corpus.separator))

    def _size(self, match_len: int) -> int:
        return min(int(self._config.factor * match_len), self._config.draft_len)

    def _grow(self, draft: ScoredTree, budget: Budget, match_len: int, at: Any, below: Below) -> ScoredTree:
        """Add the most probable nodes, as many as the length of the match allows. at: where the first are found."""
        size, found = min(self._size(match_len), budget.max_nodes), list[Node]()
        node, number = Node(-1.0, 0, 0, 0, 0, at), 0
        while True:
            if node.depth < budget.max_depth and number < size:
                for each in below(node, number):
                    heappush(found, each)
            if not found or draft.tree.num_nodes >= size:
                return draft
            number = draft.add(node := heappop(found))

    def _below_rows(self, separator: int, node: Node, number: int) -> Iterator[Node]:
        """Yield the probable nodes below a path, by the continuations that begin with it: the more frequent first."""
        rows: IdArray = node.at
        column = rows[:, node.depth]
        tokens, counts = np.unique(column[column != separator], return_counts=True)
        order = np.argsort(-counts, kind="stable")
        for rank, place in enumerate(order if self._config.tree else order[:1]):
            share = node.minus_prob * float(counts[place]) / len(column)
            if -share >= self._config.min_prob:
                token = int(tokens[place])
                yield Node(share, number, rank, node.depth + 1, token, rows[column == token])

    def _below_match(self, text: Automaton, node: Node, number: int) -> Iterator[Node]:
        """Yield the probable nodes below a match: the more frequent first, then the more recent."""
        match: Match = text.follow(node.at, node.token) if node.depth else node.at
        if match.state == ROOT:
            return
        scale = -node.minus_prob / text.continued(match)
        likely = [f for f in text.followers(match) if f.times * scale >= self._config.min_prob]
        likely.sort(key=lambda follower: (-follower.times, -follower.end))
        for rank, follower in enumerate(likely if self._config.tree else likely[:1]):
            yield Node(-follower.times * scale, number, rank, node.depth + 1, follower.token, match)
