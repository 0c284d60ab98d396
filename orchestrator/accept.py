"""Acceptance rules over a token tree, as pure functions; each returns the accepted path and the next token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from orchestrator.tree import TokenTree


class Walk(NamedTuple):
    """path: accepted nodes below the root, in order. next_token: the bonus or recovered token."""

    path: tuple[int, ...]
    next_token: int


def accept_coupled(tree: TokenTree, picks: Sequence[int]) -> Walk:
    """Descend while the target's own pick is a child; the first pick that is none is the next token.

    picks: (m + 1,) — the target's pick at every node, argmax(log p + noise).
    Law: the emitted tokens are those that the target alone would have drawn with this noise,
    whatever the tree.
    Source: docs/losslessness.md; Daliri et al. 2024, arXiv:2408.07978 (communication-free coupling).
    """
    path: list[int] = []
    node = 0
    while (child := tree.children[node].get(picks[node])) is not None:
        path.append(child)
        node = child
    return Walk(tuple(path), picks[node])
