"""How a draft tree grows level by level from a head's ranked guesses; pure, knows no model.

Candidates are numbered in the order in which they come up; 0 is the root. A score is the log-confidence of the whole
path, so that no node scores above its ancestors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from orchestrator.core.tree import TokenTree
from orchestrator.core.types import FloatArray, IdArray


class Growth(Protocol):
    """A tree that grows.

    frontier: candidates whose children are wanted next, all at one depth; empty = it is grown. fan_out: children wanted
    of each. depth: of the frontier.
    """

    frontier: list[int]
    fan_out: int

    @property
    def depth(self) -> int:
        """Depth of the frontier; the root's is 0."""

    def take(self, ids: IdArray, scores: FloatArray) -> None:
        """Take the frontier's children, (frontier, fan_out) both, the best first, scores their own log-confidence."""

    def parent(self, node: int) -> int:
        """Return the candidate above `node`."""

    def path(self, node: int) -> list[int]:
        """Return the candidates from below the root down to `node`, itself the last."""

    def token(self, node: int) -> int:
        """Return a candidate's token."""

    def tree(self) -> TokenTree:
        """Return the draft."""


class _Candidates:
    """Tokens, parents and scores of all that came up."""

    def __init__(self) -> None:
        self.tokens, self.parents, self.scores, self.depths = [-1], [-1], [0.0], [0]
        self.frontier = [0]

    @property
    def depth(self) -> int:
        """Depth of the frontier; the root's is 0."""
        return self.depths[self.frontier[0]]

    def add(self, parent: int, token: int, score: float) -> int:
        """Note a candidate and return its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(self.scores[parent] + score)
        self.depths.append(self.depths[parent] + 1)
        return len(self.tokens) - 1

    def parent(self, node: int) -> int:
        """Return the candidate above `node`."""
        return self.parents[node]

    def path(self, node: int) -> list[int]:
        """Return the candidates from below the root down to `node`."""
        return [*self.path(self.parents[node]), node] if node else []

    def token(self, node: int) -> int:
        """Return a candidate's token."""
        return self.tokens[node]

    def tree_of(self, nodes: Sequence[int]) -> TokenTree:
        """Return the tree of these candidates, parents before their children."""
        number = {0: 0} | {node: place for place, node in enumerate(nodes, start=1)}
        parents = np.array([number[self.parents[node]] for node in nodes], np.int32)
        return TokenTree(np.array([self.tokens[node] for node in nodes], np.int32), parents)


class Dynamic(_Candidates):
    """EAGLE-2's tree (arXiv:2406.16858, section 4), or a beam search (ReDrafter, arXiv:2403.09919, section 3.3).

    Each level expands the `width` candidates with the highest scores. The tree is the best `max_nodes` of all
    candidates (EAGLE-2), or of those on a last beam (beams). Ties go by smaller depth, then by smaller number, so that
    no ancestor ranks below its descendant.
    """

    def __init__(self, width: int, max_nodes: int, max_depth: int, beams: bool = False) -> None:
        super().__init__()
        self.fan_out = width
        self._levels_left = max_depth
        self._max_nodes = max_nodes
        self._beams = beams
        self._last: list[int] = []

    def take(self, ids: IdArray, scores: FloatArray) -> None:
        """Take the frontier's children and choose the next frontier among them."""
        level = [
            self.add(parent, int(token), float(score))
            for parent, row, row_scores in zip(self.frontier, ids, scores, strict=True)
            for token, score in zip(row, row_scores, strict=True)
            if score > -np.inf
        ]
        self._last = self._best(level, self.fan_out)
        if not self._beams:
            # What is not among the best so far never will be, nor anything below it.
            kept = set(self._best(range(1, len(self.tokens)), self._max_nodes))
            self._last = [node for node in self._last if node in kept]
        self._levels_left -= 1
        self.frontier = self._last if self._levels_left > 0 else []

    def tree(self) -> TokenTree:
        """Return the draft, the best nodes first."""
        nodes: Sequence[int] = range(1, len(self.tokens))
        if self._beams:
            nodes = sorted({node for leaf in self._last for node in self.path(leaf)})
        return self.tree_of(self._best(nodes, self._max_nodes))

    def _best(self, nodes: Sequence[int], count: int) -> list[int]:
        return sorted(nodes, key=lambda node: (-self.scores[node], self.depths[node], node))[:count]


class Static(_Candidates):
    """A tree of given shape: `choices` says which of its parent's children, by rank, each node is."""

    def __init__(self, choices: TokenTree) -> None:
        super().__init__()
        self.fan_out = int(choices.tokens.max()) + 1
        self._choices = choices
        self._of_choice = {0: 0}

    def take(self, ids: IdArray, scores: FloatArray) -> None:
        """Take the children that the shape names; of them, those with children of their own are the next frontier."""
        expanded = {node: place for place, node in enumerate(self.frontier)}
        self.frontier = []
        for choice, node in list(self._of_choice.items()):
            if node not in expanded:
                continue
            place = expanded[node]
            for rank, child in self._choices.children[choice].items():
                if rank < len(ids[place]) and scores[place][rank] > -np.inf:
                    added = self.add(node, int(ids[place][rank]), float(scores[place][rank]))
                    self._of_choice[child] = added
                    if self._choices.children[child]:
                        self.frontier.append(added)

    def tree(self) -> TokenTree:
        """Return the draft, in the order of the choices."""
        return self.tree_of([self._of_choice[choice] for choice in sorted(self._of_choice) if choice])
