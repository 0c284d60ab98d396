"""Grows a token tree from several sources of candidates, the likeliest node first, as long as a node may pay.

It is the reference for `native/drafts/growth.h`, and is used where that cannot be compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np

from orchestrator.core.context import Context
from orchestrator.core.cost_model import CostModel
from orchestrator.core.proposal import Budget, Proposal
from orchestrator.core.tree import TokenTree
from orchestrator.drafting.candidates import CandidateSource
from orchestrator.drafting.estimates import AcceptanceEstimates, RequestOdds, corrected
from orchestrator.drafting.joint_growth import grow_jointly

#: The highest probability that an estimate gives a candidate.
MAX_PROBABILITY = 0.99
#: The factor by which each additional source that names a token raises its prior odds.
AGREEMENT = 3.0
#: Candidates are distinguished by the highest probability that the sources before theirs give, in this many grades.
GRADES = 5


class Kind(NamedTuple):
    """What distinguishes candidates in the counts: those of one kind share an estimate.

    names: of the sources that name the candidate, joined by "+". evidence: that of the first of them. grade: of the
    likeliest token that the sources before that one name. temperature_range: the request's (`range_of`).
    """

    names: str
    evidence: int
    grade: int
    temperature_range: int


class Option(NamedTuple):
    """A token that may come next.

    place: index of the first source that names it. prior, expected, probability: its probability before any outcome of
    its kind, by the deployment's counts, and with the request's own odds.
    """

    token: int
    kind: Kind
    place: int
    prior: float
    expected: float
    probability: float


#: The state of a continuation, as each source sees it.
States = tuple[Any, ...]


class PendingNode(NamedTuple):
    """A node that may be added; a heap returns the likeliest one. states: those of its parent."""

    minus_probability: float
    depth: int
    parent: int
    token: int
    option: Option
    states: States


class GrownTree:
    """The nodes of a tree so far. options: those after the text (index 0) and after each node."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.names: list[str] = []
        self.probabilities: list[float] = []
        self.options: list[Sequence[Option]] = []
        self.children: list[dict[int, int]] = []

    def add(self, node: PendingNode) -> int:
        """Add a node and return its number."""
        self.tokens.append(node.token)
        self.parents.append(node.parent)
        self.names.append(node.option.kind.names)
        self.probabilities.append(-node.minus_probability)
        self.children[node.parent][node.token] = len(self.tokens)
        return len(self.tokens)

    def proposal(self, num_nodes: int) -> Proposal:
        """Return the proposal of the first nodes."""
        tokens, parents = (np.array(ids[:num_nodes], np.int32) for ids in (self.tokens, self.parents))
        return Proposal(TokenTree(tokens, parents), tuple(self.names[:num_nodes]))


class Growth:
    """Grows the trees of one request, and learns from the text that follows.

    is_chain: each node gets only its likeliest child.
    probabilities: (m,) float64, for each node of the last tree the probability that its whole path is accepted.
    """

    def __init__(
        self, sources: Sequence[CandidateSource], estimates: AcceptanceEstimates, is_chain: bool = False
    ) -> None:
        self._sources, self._estimates, self._is_chain = sources, estimates, is_chain
        self._odds = [RequestOdds() for _ in sources]
        self._ratios: list[float] = []
        self._max_nodes = self._max_depth = self._range = 0
        self._num_judged = 0
        self._grown = GrownTree()
        self._heap: list[PendingNode] = []
        self.probabilities = np.empty(0)

    def begin(self, context: Context) -> None:
        """Do nothing: the reference reads the prompt when it grows its first tree."""

    def grow(self, context: Context, budget: Budget, costs: CostModel, temperature_range: int = 0) -> Proposal:
        """Return the tree with the most expected tokens per second; often a bare root.

        temperature_range: the request's (`range_of`). Invariant: that of `grow_jointly`, for one tree.
        """
        self.begin_tree(context, budget, temperature_range)
        return self.sent(*grow_jointly([self], [0.0], costs))

    def begin_tree(self, context: Context, budget: Budget, temperature_range: int = 0) -> None:
        """Begin a tree after the text.

        The probability of a node is the product of those on its path, so no node is likelier than its parent, and the
        best n nodes are the n likeliest.
        """
        self._judge(context)
        self._ratios, self._range = [odds.ratio for odds in self._odds], temperature_range
        self._max_nodes, self._max_depth = budget.max_nodes, budget.max_depth
        self._grown, self._heap = GrownTree(), []
        self._expand(0, 0, 1.0, tuple(source.start(context) for source in self._sources))

    @property
    def likeliest(self) -> float:
        """The probability of the likeliest node that may be added; 0 if there is none, or no room for it."""
        has_room = self._heap and len(self._grown.tokens) < self._max_nodes
        return -self._heap[0].minus_probability if has_room else 0.0

    def add(self) -> None:
        """Add that node."""
        best = heappop(self._heap)
        node = self._grown.add(best)
        states = zip(self._sources, best.states, strict=True)
        after = tuple(source.after(state, best.token) for source, state in states)
        self._expand(node, best.depth, -best.minus_probability, after)

    def sent(self, num_nodes: int) -> Proposal:
        """Return the proposal of the tree's first nodes."""
        self.probabilities = np.array(self._grown.probabilities[:num_nodes])
        return self._grown.proposal(num_nodes) if num_nodes else Proposal.empty()

    def learn(self, tokens: Sequence[int]) -> None:
        """Compare the candidates with the text that followed, whether or not they were sent."""
        grown, node = self._grown, 0
        if grown.options:
            self._num_judged += len(tokens)
        for token in tokens if grown.options else ():
            self._compare(grown.options[node], token)
            if token not in grown.children[node]:
                break
            node = grown.children[node][token]
        self._grown = GrownTree()

    def native_drafts(self, limits: Budget, costs: CostModel) -> None:
        """Return None: the reference is not native code."""

    def note_read(self, num_tokens: int) -> None:
        """Do nothing: the reference reads the context itself, whatever native code has read."""

    def _judge(self, context: Context) -> None:
        """Compare the tokens of plain steps, for which no tree was grown, with the candidates for them."""
        for end in range(self._num_judged, len(context) if self._num_judged else 0):
            self._ratios = [odds.ratio for odds in self._odds]
            states = tuple(source.start(Context(context.ids[:end])) for source in self._sources)
            self._compare(self._options(states), context.ids[end])
        self._num_judged = len(context)

    def _compare(self, options: Sequence[Option], token: int) -> None:
        for option in options:
            self._odds[option.place].observe(option.expected, option.token == token)
            self._estimates.observe(option.kind, option.token == token)

    def _expand(self, node: int, depth: int, probability: float, states: States) -> None:
        """Note the options after a node, and the nodes that may be added with them."""
        options = self._options(states)
        self._grown.options.append(options)
        self._grown.children.append({})
        if depth == self._max_depth:
            return
        if self._is_chain and options:
            options = [max(options, key=lambda option: option.probability)]
        for option in options:
            minus_probability = -probability * option.probability
            heappush(self._heap, PendingNode(minus_probability, depth + 1, node, option.token, option, states))

    def _options(self, states: States) -> list[Option]:
        """Return the candidates of all sources, each token once."""
        options: dict[int, Option] = {}
        grade = 0
        for place, (source, state) in enumerate(zip(self._sources, states, strict=True)):
            for token, evidence in source.candidates(state):
                if (known := options.get(token)) is None:
                    prior = source.prior(evidence) * (1.0 - grade / GRADES)
                    kind = Kind(source.name, evidence, grade, self._range)
                    options[token] = self._option(token, kind, place, prior)
                else:
                    kind = known.kind._replace(names=f"{known.kind.names}+{source.name}")
                    options[token] = self._option(token, kind, known.place, corrected(known.prior, AGREEMENT))
            grade = int(GRADES * max((option.probability for option in options.values()), default=0.0))
        return list(options.values())

    def _option(self, token: int, kind: Kind, place: int, prior: float) -> Option:
        expected = self._estimates.probability(kind, prior)
        probability = min(corrected(expected, self._ratios[place]), MAX_PROBABILITY)
        return Option(token, kind, place, prior, expected, probability)
