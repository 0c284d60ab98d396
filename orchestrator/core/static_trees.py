"""Static trees by rank: the address of a node is the list of ranks on its path, 0 for the most probable child.

Source: Medusa, arXiv:2401.10774, section 2.1.2 (trees) and 2.3.3 (the search for the best one).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from orchestrator.core.arrays import FloatArray
from orchestrator.core.errors import RequestError, abbreviated
from orchestrator.core.tree import MAX_NODES, TokenTree

MAX_RANK, MAX_DEPTH, MAX_WIDTH = 63, 16, 32
Address = tuple[int, ...]

#: EAGLE-1's published tree, mc_sim_7b_63 in its own repository: 25 nodes, 4/8/8/3/2 by depth.
EAGLE_LEAVES: tuple[Address, ...] = (
    (0, 0, 0, 0, 0), (0, 0, 0, 0, 1), (0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1),
    (0, 2, 0), (0, 2, 1), (1, 0, 0), (1, 1), (2, 0), (2, 1), (3, 0),
)  # fmt: skip

#: Token Recycling's published tree: the number of children of each inner node; 80 nodes, 8/21/25/15/8/3 by depth.
RECYCLING_CHILDREN: dict[Address, int] = {
    (): 8, (0,): 8, (1,): 4, (2,): 3, (3,): 2, (4,): 1, (5,): 1, (6,): 1, (7,): 1,
    (0, 0): 8, (0, 1): 3, (0, 2): 2, (0, 3): 1, (0, 4): 1, (0, 5): 1, (0, 6): 1, (0, 7): 1,
    (1, 0): 2, (1, 1): 1, (2, 0): 1, (3, 0): 1, (4, 0): 1, (5, 0): 1,
    (0, 0, 0): 5, (0, 0, 1): 2, (0, 0, 2): 1, (0, 0, 3): 1, (0, 0, 4): 1, (0, 1, 0): 1, (0, 2, 0): 1,
    (1, 0, 0): 1, (2, 0, 0): 1, (3, 0, 0): 1,
    (0, 0, 0, 0): 3, (0, 0, 0, 1): 1, (0, 0, 0, 2): 1, (0, 0, 1, 0): 1, (0, 1, 0, 0): 1, (1, 0, 0, 0): 1,
    (0, 0, 0, 0, 0): 2, (0, 0, 0, 1, 0): 1,
}  # fmt: skip


def tree_of_choices(addresses: Sequence[Sequence[int]]) -> TokenTree:
    """Return the tree of these nodes, whose tokens are ranks; the leaf paths alone give the same tree.

    Invariant: nodes are ordered by depth, then by ranks, so that siblings are in the order of their probability.
    """
    nodes = {tuple(address[:length]) for address in addresses for length in range(1, len(address) + 1)}
    return TokenTree.from_paths(sorted(nodes, key=lambda address: (len(address), address)))


def usual_accuracy(depth: int, first: float, kept: float) -> FloatArray:
    """Return (depth, 10) float64, the accuracy of guesses by depth and rank to assume where it was not measured.

    first: accuracy of the best guess for the next token. kept: factor by which it falls with each level. Each rank is
    (1 − first) times as accurate as the one before it.
    """
    return first * np.outer(kept ** np.arange(depth), (1 - first) ** np.arange(10))


def best_first(choices: TokenTree, accuracy: FloatArray) -> TokenTree:
    """Return the same tree with its most probable nodes first, so that cutting its end costs the least.

    accuracy: (K, R) float64 as in `best_choices`, with at least the levels and ranks of the tree.
    """
    value = {
        address: np.prod([accuracy[level, rank] for level, rank in enumerate(address)]) for address in choices.paths[1:]
    }
    ordered = sorted(value, key=lambda address: (-value[address], len(address), address))
    return TokenTree.from_paths(ordered)


def read_choices(name: str, value: Any, where: str) -> TokenTree:
    """Read choices from a request's JSON; raises RequestError naming what is allowed."""
    # Checked first, since everything below takes time for each list.
    if isinstance(value, list) and len(value) > MAX_NODES:
        raise RequestError(f"{name} has {len(value)} lists, at most {MAX_NODES} allowed ({where})")
    lists = isinstance(value, list) and all(isinstance(address, list) for address in value)
    if lists and not all(1 <= len(address) <= MAX_DEPTH for address in value):
        raise RequestError(f"{name} must have 1..{MAX_DEPTH} ranks in each of its lists ({where})")
    if not lists or not all(type(rank) is int and 0 <= rank <= MAX_RANK for address in value for rank in address):
        raise RequestError(
            f"{name} must be a list of lists of ranks in 0..{MAX_RANK}, as [[0], [0, 0], [1]], "
            f"got {abbreviated(value)} ({where})"
        )
    tree = tree_of_choices(value)
    if tree.num_nodes > MAX_NODES:
        raise RequestError(f"{name} names {tree.num_nodes} nodes, at most {MAX_NODES} allowed ({where})")
    return tree


def best_choices(accuracy: FloatArray, num_nodes: int) -> TokenTree:
    """Return the static tree with the largest expected number of accepted tokens, its best nodes first.

    accuracy: (K, R) float64, how often the guess of rank r for depth k + 1 is right. Guesses are taken to be
    independent: the probability that a node is accepted is the product of the accuracies on its path, and the sum over
    all nodes is the expected number.
    Invariant: the first n nodes are the best tree of n nodes.
    """
    accuracy = np.minimum.accumulate(accuracy, axis=1)  # a lucky sample must not put a rank above a better one
    depth, width = accuracy.shape
    heap: list[tuple[float, int, Address]] = [(-float(accuracy[0, 0]), 1, (0,))]
    nodes: list[Address] = []
    while heap and len(nodes) < num_nodes:
        value, level, address = heapq.heappop(heap)
        nodes.append(address)
        if level < depth:
            heapq.heappush(heap, (value * float(accuracy[level, 0]), level + 1, (*address, 0)))
        if address[-1] + 1 < width:
            better, worse = accuracy[level - 1, address[-1]], accuracy[level - 1, address[-1] + 1]
            sibling = value * float(worse / better) if better else 0.0
            heapq.heappush(heap, (sibling, level, (*address[:-1], address[-1] + 1)))
    return TokenTree.from_paths(nodes)
