"""Trees of draft tokens from the choices of published heads, built with nested dicts alone.

A node is its address, the tuple of ranks from the root down. Row 0 is the root.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data" / "trees"
Address = tuple[int, ...]


@dataclass(frozen=True)
class Tree:
    """Draft nodes in order, each after its parent; `addresses[0]` is the root's, the empty tuple."""

    addresses: tuple[Address, ...]

    @property
    def parents(self) -> list[int]:
        """Return the parent row of nodes 1…m."""
        return [self.addresses.index(address[:-1]) for address in self.addresses[1:]]

    @property
    def depths(self) -> list[int]:
        """Return the depth of rows 0…m, by which a node's position exceeds the root's."""
        return [len(address) for address in self.addresses]

    @property
    def depth_counts(self) -> list[int]:
        """Return how many nodes there are at depth 1, 2, …."""
        return [self.depths.count(depth) for depth in range(1, max(self.depths) + 1)]

    @property
    def mask(self) -> list[list[bool]]:
        """Return the tree mask (m+1, m+1): each row sees itself and its ancestors."""
        return [[row[: len(column)] == column for column in self.addresses] for row in self.addresses]

    @property
    def leaf_paths(self) -> list[list[int]]:
        """Return the rows from the root to each leaf, leaves in the order of their rows."""
        inner = {address[:-1] for address in self.addresses[1:]}
        leaves = [address for address in self.addresses if address not in inner]
        return [[self.addresses.index(leaf[:n]) for n in range(len(leaf) + 1)] for leaf in leaves]


def published_choices(name: str) -> list[list[int]]:
    """Return the choices in tests/data/trees/`name`.json, in the published order."""
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))["choices"]


def tree_of_choices(choices: Sequence[Sequence[int]]) -> Tree:
    """Return the tree of choices, given as nodes or as leaf paths.

    Each choice is walked down from the root, which adds the children that are missing; then the rows are counted level
    by level, siblings by rank. Unlike the orchestrator, this neither sorts nor cuts addresses.
    """
    top: dict[int, Any] = {}
    for choice in choices:
        below = top
        for rank in choice:
            below = below.setdefault(rank, {})
    rows: list[tuple[Address, dict[int, Any]]] = [((), top)]
    for address, below in rows:  # grows while it is walked
        rows += [((*address, rank), below[rank]) for rank in sorted(below)]
    return Tree(tuple(address for address, _ in rows))
