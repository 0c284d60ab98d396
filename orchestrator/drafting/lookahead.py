"""Lookahead decoding: n-grams collected from a Jacobi trajectory are verified in the pass that continues it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from pydantic import Field

from orchestrator.core.context import Context
from orchestrator.core.errors import RequestError
from orchestrator.core.methods import METHODS
from orchestrator.core.proposal import Budget, Proposal, Proposer, Step
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import MAX_NODES, TreeBuilder
from orchestrator.core.types import Acceptance
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.drafting.jacobi import Fill, filled, spare_tokens
from orchestrator.drafting.parameters import WHERE, MethodConfig


class Window:
    """ngram − 1 rows of `width` columns; the first ngram − 2 steps have fewer and wider rows.

    rows: oldest first; rows[j][i] is a guess at position root + i + j, and rows[0][0] is the root itself.
    spare: tokens that fill columns without a guess, row by row.
    Source: Fu et al. 2024, arXiv:2402.02057, Algorithm 2; docs/methods/lookahead.md.
    """

    def __init__(self, width: int, ngram: int, root: int, spare: Iterator[int]) -> None:
        self._width = width
        self._num_rows = ngram - 1
        self._spare = spare
        self.rows = [[root, *islice(spare, width + ngram - 3)]]

    @property
    def is_full(self) -> bool:
        """True when a column and the target's token after it are an n-gram."""
        return len(self.rows) == self._num_rows

    @property
    def columns(self) -> list[tuple[int, ...]]:
        """Each column's tokens, row 0 first: consecutive positions."""
        return list(zip(*self.rows, strict=True))

    def advance(self, num_accepted: int, target_tokens: list[int], root: int) -> None:
        """Move on to the new root, which is num_accepted + 1 positions later.

        target_tokens: (k,), the target's tokens after the first k columns of the last row; they become a new row.
        Invariant: every token keeps its absolute position. A full window drops its oldest row, which moves each row by
        one position; while the window fills, the rows stay and lose one more column.
        """
        kept = self.rows[1:] if self.is_full else self.rows
        drop = num_accepted if self.is_full else num_accepted + 1
        rows = [row[drop:] for row in [*kept, target_tokens]]
        rows[0][:1] = [root]
        width = self._width + self._num_rows - len(rows)
        self.rows = [filled(row, width, self._spare) for row in rows]


class NgramPool:
    """Up to `guesses` tails per first token; the oldest is dropped to make room.

    Source: Fu et al. 2024, arXiv:2402.02057, section 3.2.
    """

    def __init__(self, guesses: int) -> None:
        self._guesses = guesses
        self._tails: dict[int, dict[tuple[int, ...], None]] = {}  # dictionaries keep the order of entry

    def add(self, ngram: tuple[int, ...]) -> None:
        """Add an n-gram; a known one becomes the newest of its first token."""
        tails = self._tails.setdefault(ngram[0], {})
        tails.pop(ngram[1:], None)
        tails[ngram[1:]] = None
        if len(tails) > self._guesses:
            del tails[next(iter(tails))]

    def add_text(self, ids: Sequence[int], size: int) -> None:
        """Add all n-grams of `size` tokens of a text, in order."""
        for ngram in zip(*(ids[start:] for start in range(size)), strict=False):
            self.add(ngram)

    def tails(self, token: int) -> list[tuple[int, ...]]:
        """Return what has followed `token`, the newest first."""
        return list(reversed(self._tails.get(token, ())))


class Shape(NamedTuple):
    """window W: columns, i.e. how far ahead. ngram N: tokens of an n-gram. guesses G: maximum tails per first token."""

    window: int
    ngram: int
    guesses: int

    @property
    def num_nodes(self) -> int:
        """Maximum draft nodes of a tree: row 0 without the root, N − 2 more rows, G tails."""
        return (self.window - 1) + (self.ngram - 2) * self.window + self.guesses * (self.ngram - 1)


#: (maximum parameters of the target, shape): a small shape, then the paper's for 7B, 13B and 34B, with bounds between
#: these sizes. The larger the target, the sooner a wider pass takes longer; small targets run on small machines.
SHAPES = (
    (3e9, Shape(5, 4, 5)),
    (10e9, Shape(15, 5, 15)),
    (21e9, Shape(10, 5, 10)),
    (math.inf, Shape(7, 5, 7)),
)


class LookaheadConfig(MethodConfig):
    """window, ngram, guesses: W, N, G; 0 = by the target's size. pool_from_prompt: begin with the prompt's n-grams.

    fill: where the tokens of the first row, and of columns that are missing later, come from.
    """

    window: int = Field(0, ge=0, le=MAX_NODES)
    ngram: int = Field(0, ge=0, le=MAX_NODES)
    guesses: int = Field(0, ge=0, le=MAX_NODES)
    pool_from_prompt: bool = True
    fill: Fill = "prompt"


def shape_of(config: LookaheadConfig, num_parameters: int, max_nodes: int) -> Shape:
    """Return W, N, G of a request; raises RequestError when its trees do not fit into max_nodes.

    num_parameters: of the target; 0 = unknown, which counts as small.
    """
    default = next(shape for most, shape in SHAPES if num_parameters <= most)
    shape = Shape(config.window or default.window, config.ngram or default.ngram, config.guesses or default.guesses)
    if shape.ngram < 2:
        raise RequestError(f"ngram must be 0 (by the target's size) or in 2..{MAX_NODES}, got {shape.ngram} ({WHERE})")
    if shape.num_nodes > max_nodes:
        raise RequestError(
            f"lookahead with window {shape.window}, ngram {shape.ngram}, guesses {shape.guesses} needs "
            f"{shape.num_nodes} nodes, but {max_nodes} are allowed (max_nodes in {WHERE} or in the deployment file)"
        )
    return shape


class Lookahead(Proposer):
    """Proposes the window of a Jacobi trajectory and the pool's n-grams that begin with the root, as one token tree.

    Invariant: at most (W − 1) + (N − 2)·W + G·(N − 1) nodes; identical paths share their nodes, and candidates come
    before window nodes. Any node may be accepted, though the authors accept pool tails only; the text is the target's
    in both cases.
    Source: Fu et al. 2024, arXiv:2402.02057; docs/methods/lookahead.md.
    """

    name = "lookahead"
    needs = METHODS[name].options

    def __init__(self, config: LookaheadConfig, dependencies: ProposerDependencies) -> None:
        self._shape = shape_of(config, dependencies.num_parameters, min(config.max_nodes, dependencies.max_nodes))
        self._pool_from_prompt, self._fill = config.pool_from_prompt, config.fill
        self._pool = NgramPool(self._shape.guesses)
        self._window: Window | None = None
        self._last_row: list[int] = []

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return the candidates and the window, without the columns that exceed the budget."""
        if self._window is None:
            if self._pool_from_prompt:
                self._pool.add_text(context.ids[: context.prompt_len], self._shape.ngram)
            spare = spare_tokens(self._fill, context, sampling.seed)
            self._window = Window(self._shape.window, self._shape.ngram, context.root, spare)
        # A window is wider than W while it fills; the bound on the nodes holds from the first step.
        tree = TreeBuilder(min(budget.max_nodes, self._shape.num_nodes), budget.max_depth)
        for tail in self._pool.tails(context.root):
            tree.add_path(0, tail)
        num_candidates = tree.num_nodes
        self._last_row = _lay(self._window.columns, tree)
        sources = ("lookahead.pool",) * num_candidates
        return Proposal(tree.build(), sources + ("lookahead.window",) * (tree.num_nodes - num_candidates))

    def observe(self, steps: Sequence[Step]) -> None:
        """Add the n-grams that the target's tokens complete to the pool, and move the window on."""
        for step in steps:
            self._advance(step.acceptance)

    def _advance(self, acceptance: Acceptance) -> None:
        assert self._window is not None, "observed before anything was proposed"
        tokens = [] if acceptance.target_tokens is None else acceptance.target_tokens[self._last_row].tolist()
        if self._window.is_full:
            for column, token in zip(self._window.columns, tokens, strict=False):
                self._pool.add((*column, token))
        self._window.advance(len(acceptance.path), tokens, acceptance.next_token)


def _lay(columns: list[tuple[int, ...]], tree: TreeBuilder) -> list[int]:
    """Lay the window's columns into the tree, each below its token of row 0; return the last row's nodes.

    Stops at the first column that does not fit completely, so that the nodes are those of columns 0, 1, …
    """
    nodes: list[int] = []
    head: int | None = 0
    for number, column in enumerate(columns):
        head = tree.add_path(head, column[:1]) if number else 0  # column 0 begins with the root itself
        last = tree.add_path(head, column[1:])
        if last is None:
            break
        nodes.append(last)
    return nodes
