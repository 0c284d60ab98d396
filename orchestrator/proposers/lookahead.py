"""Lookahead decoding: n-grams collected from a Jacobi trajectory, verified in the very pass that goes on with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from orchestrator.context import Context
from orchestrator.errors import RequestError
from orchestrator.proposal import Budget, Proposal, Proposer
from orchestrator.proposers.jacobi import prompt_tokens
from orchestrator.proposers.lookahead_window import Window
from orchestrator.proposers.ngram_pool import NgramPool
from orchestrator.sampling_params import Sampling
from orchestrator.settings import WHERE, MethodConfig, flag, whole
from orchestrator.tree import MAX_NODES, TokenTree
from orchestrator.types import Acceptance, Want


class Shape(NamedTuple):
    """window W: columns, how far ahead. ngram N: tokens of an n-gram. guesses G: most tails per first token."""

    window: int
    ngram: int
    guesses: int

    @property
    def num_nodes(self) -> int:
        """Most draft nodes of a tree: row 0 without the root, N − 2 more rows, G tails."""
        return (self.window - 1) + (self.ngram - 2) * self.window + self.guesses * (self.ngram - 1)


#: Shapes for targets of up to so many parameters: a small one, then the paper's for 7B, 13B and 34B, the borders
#: between their sizes. The larger the target, the sooner a wider pass takes longer; small ones run on small machines.
SHAPES = (
    (3e9, Shape(5, 4, 5)),
    (10e9, Shape(15, 5, 15)),
    (21e9, Shape(10, 5, 10)),
    (math.inf, Shape(7, 5, 7)),
)


@dataclass(frozen=True, kw_only=True)
class LookaheadConfig(MethodConfig):
    """window, ngram, guesses: W, N, G; 0 = by the target's size. pool_from_prompt: begin with the prompt's n-grams."""

    window: int = whole(0, 0, MAX_NODES)
    ngram: int = whole(0, 0, MAX_NODES)
    guesses: int = whole(0, 0, MAX_NODES)
    pool_from_prompt: bool = flag(True)


def shape_of(config: LookaheadConfig, num_parameters: int, max_nodes: int) -> Shape:
    """Return W, N, G of a request; raises RequestError when its trees do not fit into max_nodes.

    num_parameters: of the target; 0 = not known, which counts as small.
    """
    default = next(shape for most, shape in SHAPES if num_parameters <= most)
    shape = Shape(config.window or default.window, config.ngram or default.ngram, config.guesses or default.guesses)
    if shape.ngram < 2:
        raise RequestError(f"ngram must be 0 (by the target's size) or in 2..{MAX_NODES}, got {shape.ngram} ({WHERE})")
    if shape.num_nodes > max_nodes:
        raise RequestError(
            f"lookahead with window {shape.window}, ngram {shape.ngram}, guesses {shape.guesses} needs "
            f"{shape.num_nodes} nodes, but {max_nodes} are allowed (max_nodes in {WHERE} or serving.toml)"
        )
    return shape


class Lookahead(Proposer):
    """Proposes the window of a Jacobi trajectory and the pool's n-grams that begin with the root, as one token tree.

    num_parameters, max_nodes: of the target and of a tree of this deployment.
    Law: at most (W − 1) + (N − 2)·W + G·(N − 1) nodes; identical paths are one node, and candidates stand before
    window nodes. Any node may be accepted, where the authors accept pool tails only: the text is the target's either
    way.
    Source: Fu et al. 2024, arXiv:2402.02057; docs/methods/lookahead.md.
    """

    name = "lookahead"
    want = Want(picks=True)

    def __init__(self, config: LookaheadConfig, num_parameters: int = 0, max_nodes: int = MAX_NODES) -> None:
        self._shape = shape_of(config, num_parameters, min(config.max_nodes, max_nodes))
        self._pool_from_prompt = config.pool_from_prompt
        self._pool = NgramPool(self._shape.guesses)
        self._window: Window | None = None
        self._last_row: list[int] = []

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return candidates and window; columns beyond the budget are left out."""
        if self._window is None:
            self._window = self._begin(context)
        # A narrow window is wider than W while it fills: the law's bound holds from the first step.
        tree = _Branches(context.root, min(budget.max_nodes, self._shape.num_nodes), budget.max_depth)
        for tail in self._pool.tails(context.root):
            tree.grow(0, tail)
        num_candidates = tree.num_nodes
        self._last_row = _lay(self._window.columns, tree)
        sources = ("lookahead.pool",) * num_candidates
        return Proposal(tree.built(), sources + ("lookahead.window",) * (tree.num_nodes - num_candidates))

    def observe(self, tree: TokenTree, acceptance: Acceptance) -> None:
        """Enter the n-grams that the target's picks complete, and move the window on."""
        assert self._window is not None, "observed before anything was proposed"
        answers = [] if acceptance.picks is None else acceptance.picks[self._last_row].tolist()
        if self._window.is_full:
            for column, answer in zip(self._window.columns, answers, strict=False):
                self._pool.add((*column, answer))
        self._window.advance(len(acceptance.path), answers, acceptance.next_token)

    def _begin(self, context: Context) -> Window:
        if self._pool_from_prompt:
            self._pool.add_text(context.ids[: context.prompt_len], self._shape.ngram)
        return Window(self._shape.window, self._shape.ngram, context.root, prompt_tokens(context))


def _lay(columns: list[tuple[int, ...]], tree: _Branches) -> list[int]:
    """Lay the window's columns into the tree, each below its token of row 0; return the last row's nodes.

    Stops at the first column that does not fit whole, so that the nodes are those of columns 0, 1, …
    """
    nodes: list[int] = []
    head: int | None = -1  # the root's place in row 0: the first head is the root
    for column in columns:
        head = tree.grow(head, column[:1])
        last = tree.grow(head, column[1:])
        if last is None:
            break
        nodes.append(last)
    return nodes


class _Branches:
    """A tree that grows by paths; what is there already is shared, what the budget does not cover is left out."""

    def __init__(self, root: int, max_nodes: int, max_depth: int) -> None:
        self._max_nodes = max_nodes
        self._max_depth = max_depth
        self._nodes: dict[tuple[int, int], int] = {(-1, root): 0}
        self._depths = [0]

    @property
    def num_nodes(self) -> int:
        """Draft nodes, the root not counted."""
        return len(self._nodes) - 1

    def grow(self, node: int | None, tokens: Sequence[int]) -> int | None:
        """Lay tokens one below the other, the first below `node`; return the last one's node, None if left out."""
        for token in tokens:
            if node is None:
                return None
            node = self._child(node, token)
        return node

    def built(self) -> TokenTree:
        """Return the tree."""
        parents, tokens = np.array(list(self._nodes), np.int32)[1:].T.copy()
        return TokenTree(tokens, parents)

    def _child(self, parent: int, token: int) -> int | None:
        child = self._nodes.get((parent, token))
        if child is None and self.num_nodes < self._max_nodes and self._depths[parent] < self._max_depth:
            child = self._nodes[parent, token] = len(self._nodes)
            self._depths.append(self._depths[parent] + 1)
        return child
