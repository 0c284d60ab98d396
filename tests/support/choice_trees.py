"""Trees of draft tokens built from nested lists alone: choices of published heads, and beams that share prefixes.

A node is its address, a tuple: the ranks (choices) or the tokens (beams) from the root down. Row 0 is the root.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
    """Return the tree of choices, given as nodes or as leaf paths, ordered by depth and then by ranks."""
    nodes = {tuple(choice[:n]) for choice in choices for n in range(len(choice) + 1)}
    return Tree(tuple(sorted(nodes, key=lambda address: (len(address), address))))


def tree_of_beams(beams: Sequence[Sequence[int]]) -> Tree:
    """Return the prefix tree of beams (B, L) of drafted tokens, nodes in the order in which the beams first hold them."""
    nodes = dict.fromkeys([()] + [tuple(beam[:n]) for beam in beams for n in range(1, len(beam) + 1)])
    return Tree(tuple(nodes))


def unpacker(beams: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the row (B, L) that holds each beam's tokens in `tree_of_beams(beams)`."""
    tree = tree_of_beams(beams)
    return [[tree.addresses.index(tuple(beam[:n])) for n in range(1, len(beam) + 1)] for beam in beams]
