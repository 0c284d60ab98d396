"""How a draft tree grows level by level from a head's ranked guesses; independent of any model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from orchestrator.core.arrays import FloatArray, IdArray
from orchestrator.core.tree import TokenTree


class GrowingTree(ABC):
    """Candidates for a draft tree, numbered in the order in which they are added; candidate 0 is the root.

    tokens, parents, depths, scores: one entry per candidate. A score is the log-confidence of the whole path, so no
    candidate scores above its ancestors. bounds: the upper bound of a sampled token's score, known before the token
    was sampled (runtime/models/heads/engines/sampled.py); for other tokens, the score.
    frontier: the candidates to expand next, all at one depth; empty when the tree is complete.
    fan_out: how many children each of them may get. min_score: no candidate's bound is below it.
    """

    def __init__(self, fan_out: int, min_score: float) -> None:
        self.fan_out = fan_out
        self._min_score = min_score
        self.tokens, self.parents, self.scores, self.bounds, self.depths = [-1], [-1], [0.0], [0.0], [0]
        self.frontier = [0]

    @property
    def depth(self) -> int:
        """Depth of the frontier; the root's is 0."""
        return self.depths[self.frontier[0]]

    def path(self, node: int) -> list[int]:
        """Return the candidates from below the root down to `node`, which is included."""
        return [*self.path(self.parents[node]), node] if node else []

    @abstractmethod
    def add_children(self, ids: IdArray, scores: FloatArray, bounds: FloatArray | None = None) -> None:
        """Add the frontier's children and choose the next frontier.

        ids: (frontier, fan_out) int32, guesses for the token after each candidate of the frontier, in their order.
        scores: (frontier, fan_out) float64, the log-confidence of each; −inf where a token has no probability.
        bounds: (frontier, fan_out) float64, upper bounds of the scores, known before the tokens were sampled; None if
        the tokens are not sampled.
        """

    @abstractmethod
    def drafted(self) -> list[int]:
        """Return the candidates that make up the draft, in its order, parents before their children."""

    def token_tree(self) -> TokenTree:
        """Return the draft."""
        return self._tree_of(self.drafted())

    def paths_to_frontier(self) -> tuple[TokenTree, list[int]]:
        """Return the tree of the frontier and its ancestors, and the node of each candidate of the frontier, 0 = root.

        It has no more nodes than the draft may have: a candidate that no draft will hold is not expanded.
        """
        nodes = sorted({node for candidate in self.frontier for node in self.path(candidate)})
        return self._tree_of(nodes), [nodes.index(node) + 1 if node else 0 for node in self.frontier]

    def _tree_of(self, nodes: Sequence[int]) -> TokenTree:
        """Return these candidates as a tree; each comes after its parent."""
        index = {0: 0} | {node: i for i, node in enumerate(nodes, start=1)}
        parents = np.array([index[self.parents[node]] for node in nodes], np.int32)
        return TokenTree(np.array([self.tokens[node] for node in nodes], np.int32), parents)

    def _is_likely(self, parent: int, bound: float) -> bool:
        """Return whether a guess below `parent` may become a candidate; a bound of −inf means that there is none."""
        return bound > -np.inf and self.scores[parent] + bound >= self._min_score

    def _add(self, parent: int, token: int, score: float, bound: float) -> int:
        """Add a candidate and return its number."""
        self.tokens.append(int(token))
        self.parents.append(parent)
        self.scores.append(self.scores[parent] + float(score))
        self.bounds.append(self.scores[parent] + float(bound))
        self.depths.append(self.depths[parent] + 1)
        return len(self.tokens) - 1


class DynamicTree(GrowingTree):
    """EAGLE-2's tree (arXiv:2406.16858, section 4), or a beam search (ReDrafter, arXiv:2403.09919, section 3.3).

    Each level expands the `width` candidates with the highest scores. The tree holds the `max_nodes` candidates with
    the highest bounds, among all candidates (EAGLE-2) or among those on the last beams (beam search). Ties go to the
    smaller depth, then to the smaller number, so that no ancestor ranks below its descendant.
    Invariant: unless `beam_search` is set, whether a sampled candidate is in the tree depends neither on its token, nor
    on those of later siblings, nor on the nodes below those siblings (docs/losslessness.md).
    """

    def __init__(
        self, width: int, max_nodes: int, max_depth: int, beam_search: bool = False, min_score: float = -np.inf
    ) -> None:
        super().__init__(width, min_score)
        self._levels_left = max_depth
        self._max_nodes = max_nodes
        self._beam_search = beam_search
        self._last_level: list[int] = []

    def add_children(self, ids: IdArray, scores: FloatArray, bounds: FloatArray | None = None) -> None:
        """Add the frontier's children; the best of them are the next frontier."""
        level = [
            self._add(parent, token, score, bound)
            for parent, *row in zip(self.frontier, ids, scores, scores if bounds is None else bounds, strict=True)
            for token, score, bound in zip(*row, strict=True)
            if self._is_likely(parent, bound)
        ]
        if not level:  # the beams of the level before remain the last
            self.frontier = []
            return
        self._last_level = self._best(level, self.fan_out, self.scores)
        if not self._beam_search:
            # A candidate that is not among the best now never will be, nor will its descendants.
            best = set(self._best(range(1, len(self.tokens)), self._max_nodes, self.bounds))
            self._last_level = [node for node in self._last_level if node in best]
        self._levels_left -= 1
        self.frontier = self._last_level if self._levels_left > 0 else []

    def drafted(self) -> list[int]:
        """Return the candidates of the draft, the best first."""
        nodes: Sequence[int] = range(1, len(self.tokens))
        if self._beam_search:
            nodes = sorted({node for leaf in self._last_level for node in self.path(leaf)})
        return self._best(nodes, self._max_nodes, self.bounds)

    def _best(self, nodes: Sequence[int], count: int, values: Sequence[float]) -> list[int]:
        return sorted(nodes, key=lambda node: (-values[node], self.depths[node], node))[:count]


class StaticTree(GrowingTree):
    """A tree of a given shape: the token of each node of `choices` is its rank among its parent's children.

    draws: the children are sampled. Whether a child is kept must not depend on its token, so min_score is compared with
    its parent's score instead.
    """

    def __init__(self, choices: TokenTree, min_score: float = -np.inf, draws: bool = False) -> None:
        super().__init__(int(choices.tokens.max()) + 1, min_score)
        self._draws = draws
        self._choices = choices
        self._candidates = {0: 0}  # node of `choices` → candidate

    def add_children(self, ids: IdArray, scores: FloatArray, bounds: FloatArray | None = None) -> None:
        """Add the children that the shape has; those with children of their own are the next frontier."""
        bounds = scores if bounds is None else bounds
        rows = {node: row for row, node in enumerate(self.frontier)}
        self.frontier = []
        for choice, node in list(self._candidates.items()):
            if node not in rows:
                continue
            guesses = list(zip(*(array[rows[node]] for array in (ids, scores, bounds)), strict=True))
            for rank, child in self._choices.children[choice].items():
                if rank < len(guesses) and self._is_likely(node, guesses[rank][-1]):
                    self._candidates[child] = self._add(node, *guesses[rank])
                    if self._choices.children[child]:
                        self.frontier.append(self._candidates[child])

    def _is_likely(self, parent: int, bound: float) -> bool:
        return super()._is_likely(parent, 0.0 if self._draws and bound > -np.inf else bound)

    def drafted(self) -> list[int]:
        """Return the candidates of the draft, in the order of the choices."""
        return [self._candidates[choice] for choice in sorted(self._candidates) if choice]


def in_sibling_order(choices: TokenTree) -> TokenTree:
    """Return the shape with each rank replaced by the place among its siblings: the i-th sibling is sampled i-th."""
    return TokenTree(np.array(choices.ranks, np.int32), choices.parents)
