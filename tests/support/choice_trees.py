"""Trees of draft tokens built from nested lists alone: the choices of published heads.

A node is its address, a tuple: the ranks from the root down. Row 0 is the root.
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
    """Draft nodes in order, each behind its parent; `addresses[0]` is the root's, the empty one."""

    addresses: tuple[Address, ...]

    @property
    def parents(self) -> list[int]:
        """Return the parent row of nodes 1…m."""
        return [self.addresses.index(address[:-1]) for address in self.addresses[1:]]

    @property
    def depths(self) -> list[int]:
        """Return the depth of rows 0…m: what a node's position is beyond the root's."""
        return [len(address) for address in self.addresses]

    @property
    def depth_counts(self) -> list[int]:
        """Return how many nodes there are at depth 1, 2, …."""
        return [self.depths.count(depth) for depth in range(1, max(self.depths) + 1)]

    @property
    def mask(self) -> list[list[bool]]:
        """Return who sees whom (m+1, m+1): each row itself and its ancestors."""
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

    Each is walked down from the root, a child is made where there is none, and the rows are counted level by level,
    siblings by rank: no addresses are sorted or cut, as the orchestrator does.
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
