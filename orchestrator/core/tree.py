"""The token tree, in which every method proposes its drafts; it knows nothing of models or probabilities."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from orchestrator.core.arrays import BoolArray, IdArray
from orchestrator.core.errors import EngineError

#: Maximum draft nodes of any tree.
MAX_NODES = 128


@dataclass(frozen=True, eq=False)
class TokenTree:
    """Draft tokens below the last committed token (node 0, the root, whose id is not stored here).

    tokens: (m,) int32, the token ids of nodes 1…m.
    parents: (m,) int32, the parents of nodes 1…m; 0 is the root, and parents[i - 1] < i.
    Invariant: the children of one parent have distinct tokens, and are stored in the order in which they are tried.
    """

    tokens: IdArray
    parents: IdArray

    @classmethod
    def bare(cls) -> TokenTree:
        """Return the tree without drafts: the root alone."""
        return _BARE

    @classmethod
    def chain(cls, tokens: Sequence[int] | IdArray) -> TokenTree:
        """Return the tree in which each token is the child of the one before it."""
        ids = np.asarray(tokens, dtype=np.int32)
        return cls(ids, np.arange(len(ids), dtype=np.int32))

    @classmethod
    def from_paths(cls, paths: Sequence[Sequence[int]]) -> TokenTree:
        """Return the tree of token paths that start below the root; paths share the nodes of a common prefix."""
        builder = TreeBuilder()
        for path in paths:
            builder.add_path(0, path)
        return builder.build()

    @classmethod
    def checked(cls, tokens: IdArray, parents: IdArray, vocab_size: int, max_nodes: int) -> TokenTree:
        """Return a tree built from untrusted arrays.

        tokens, parents: (m,) int32, as above. max_nodes: maximum draft nodes allowed.
        Raises: EngineError naming the first invariant that the arrays break.
        """
        if tokens.shape != parents.shape or tokens.ndim != 1:
            raise EngineError(f"tree has {tokens.shape} node_ids but {parents.shape} node_parents; they must match")
        if len(tokens) > max_nodes:
            raise EngineError(f"tree has {len(tokens)} nodes, at most {max_nodes} allowed")
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < vocab_size):
            raise EngineError(f"tree has a token outside 0..{vocab_size - 1}")
        previous = np.arange(len(parents))  # the node before each of the nodes 1…m
        if (parents == previous).all():  # a chain
            return cls(tokens, parents)
        if ((parents < 0) | (parents > previous)).any():
            raise EngineError("tree has a parent that does not come before its child")
        if len(set(zip(parents.tolist(), tokens.tolist(), strict=True))) != len(tokens):
            raise EngineError("tree has two children of one parent with the same token")
        return cls(tokens, parents)

    @property
    def num_nodes(self) -> int:
        """Number of draft nodes; the root is not counted."""
        return len(self.tokens)

    @cached_property
    def depths(self) -> IdArray:
        """(m + 1,) int32, the depth of every node; the root has depth 0."""
        depths = [0]
        for parent in self.parents.tolist():
            depths.append(depths[parent] + 1)
        return np.array(depths, np.int32)

    @cached_property
    def mask(self) -> BoolArray:
        """The tree mask, (m + 1, m + 1) bool: row i is True at node i and at its ancestors."""
        mask = np.eye(self.num_nodes + 1, dtype=np.bool_)
        for node, parent in enumerate(self.parents.tolist(), start=1):
            mask[node] |= mask[parent]
        return mask

    @cached_property
    def children(self) -> list[dict[int, int]]:
        """For each node its children as {token: node}, in the order in which they are tried."""
        children: list[dict[int, int]] = [{} for _ in range(self.num_nodes + 1)]
        for node, (token, parent) in enumerate(zip(self.tokens.tolist(), self.parents.tolist(), strict=True), start=1):
            children[parent][token] = node
        return children

    @cached_property
    def ranks(self) -> list[int]:
        """For each of the nodes 1…m its place among its siblings, 0 for the first."""
        num_children, ranks = [0] * (self.num_nodes + 1), []
        for parent in self.parents.tolist():
            ranks.append(num_children[parent])
            num_children[parent] += 1
        return ranks

    @cached_property
    def paths(self) -> list[tuple[int, ...]]:
        """For each node the tokens on its path from below the root, its own token last; empty for the root."""
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(self.tokens.tolist(), self.parents.tolist(), strict=True):
            paths.append((*paths[parent], token))
        return paths

    @cached_property
    def is_chain(self) -> bool:
        """True if every node is the child of the one before it. A bare root is a chain."""
        return bool((self.parents == np.arange(self.num_nodes)).all())

    def within(self, max_nodes: int, max_depth: int) -> IdArray:
        """Return the first `max_nodes` nodes of depth `max_depth` or less, (k,) int32, ascending."""
        return (np.flatnonzero(self.depths[1:] <= max_depth)[: max(max_nodes, 0)] + 1).astype(np.int32)

    def only(self, nodes: IdArray) -> TokenTree:
        """Return the tree of these nodes only, renumbered 1…k.

        nodes: (k,) int32, ascending; the parent of each is the root or one of them.
        """
        renumbered = np.zeros(self.num_nodes + 1, np.int32)
        renumbered[nodes] = np.arange(1, len(nodes) + 1)
        return TokenTree(self.tokens[nodes - 1], renumbered[self.parents[nodes - 1]])


class TreeBuilder:
    """Builds a tree from nodes and paths; a child that exists is not added again.

    max_nodes, max_depth: limits that `add_path` keeps to.
    """

    def __init__(self, max_nodes: int = sys.maxsize, max_depth: int = sys.maxsize) -> None:
        self._max_nodes = max_nodes
        self._max_depth = max_depth
        self._nodes: dict[tuple[int, int], int] = {}  # (parent, token) → node
        self._depths = [0]

    @property
    def num_nodes(self) -> int:
        """Number of draft nodes so far; the root is not counted."""
        return len(self._nodes)

    def add(self, parent: int, token: int) -> int:
        """Return the child of `parent` with this token; add it if it is new."""
        node = self._nodes.setdefault((parent, token), self.num_nodes + 1)
        if node == len(self._depths):
            self._depths.append(self._depths[parent] + 1)
        return node

    def add_path(self, node: int | None, tokens: Sequence[int]) -> int | None:
        """Add a chain of tokens below `node`; return its last node, or None if a token does not fit."""
        for token in tokens:
            if node is None or not ((node, token) in self._nodes or self._has_room_below(node)):
                return None
            node = self.add(node, token)
        return node

    def build(self) -> TokenTree:
        """Return the tree, its nodes in the order in which they were added."""
        edges = np.array(list(self._nodes), np.int32).reshape(-1, 2)
        return TokenTree(edges[:, 1].copy(), edges[:, 0].copy())

    def _has_room_below(self, node: int) -> bool:
        return self.num_nodes < self._max_nodes and self._depths[node] < self._max_depth


_BARE = TokenTree(np.empty(0, np.int32), np.empty(0, np.int32))
