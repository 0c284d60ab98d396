"""Every method over every text, in every dtype; what was counted, by all that it may depend on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from orchestrator.core.context import Context
from orchestrator.core.deployment.checkpoint import read_checkpoint
from orchestrator.core.drafting import Limits
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.drafter import DraftRequest
from orchestrator.core.proposal import Budget, Proposal, Proposer
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import NO_HEAD_INPUT, DraftResponse, HeadInput, StepOptions
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.drafting.registry import select_method
from orchestrator.drafting.tables import load_tables
from runtime.engine.calls import EngineCall
from runtime.engine.draft import DraftEngine
from runtime.engine.paged import PagedModel
from runtime.models.load import load_model
from tests.numerics.counts import EXACT, METHODS, PLAIN, SIZES, Tally
from tests.numerics.passes import Forced, Rows, Step, compare, follow
from tests.support.exactness import SAMPLINGS


class Made(Proposer):
    """A tree of one size: some of the text that will be said, and random branches beside it."""

    name, options = "made", StepOptions()

    def __init__(self, num_nodes: int, text: Sequence[int], vocab_size: int) -> None:
        self._size, self._text, self._vocab_size = num_nodes, text, vocab_size
        self._random = np.random.default_rng(num_nodes)

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return it; every branch hangs below the root or a node of the text."""
        said = tuple(self._text[len(context.output) :][: min(self._size // 2, 7, budget.max_depth)])
        paths = dict.fromkeys(said[: i + 1] for i in range(len(said)))
        while len(paths) < self._size and budget.max_depth:
            stem = said[: self._random.integers(min(len(said), budget.max_depth - 1) + 1)]
            paths[(*stem, int(self._random.integers(self._vocab_size)))] = None
        return Proposal.of(TokenTree.from_paths(list(paths)), self.name)


class Line:
    """The draft model in this process, one call at a time."""

    def __init__(self, folder: str) -> None:
        self._engine = DraftEngine(PagedModel(load_model(folder, "cpu", "float32"), 64, 16))

    def begin(self, context: Context, sampling: Sampling, budget: Budget, head: HeadInput = NO_HEAD_INPUT) -> None:
        """Do nothing: `propose` drafts."""

    def propose(
        self, context: Context, sampling: Sampling, budget: Budget, head: HeadInput = NO_HEAD_INPUT
    ) -> DraftResponse:
        """Return the draft model's chain."""
        answers: list[Any] = []
        request = DraftRequest(delta_of(context, 0, 1, ""), sampling, budget.max_nodes, budget.max_depth)
        jobs = [EngineCall(request, math.inf, answers.append)]
        while jobs:
            jobs = self._engine.advance(jobs)
        drafted: DraftResponse = answers[0]
        return drafted

    def close(self) -> None:
        """Forget the request."""
        self._engine.sequences.drop(1)


Key = tuple[str, str, str, str, int]  # sampling, dtype, compared with, method, tree size up to
Cells = dict[Key, Tally]


class Bench:
    """The sides, what proposers draft from, and the counts so far."""

    def __init__(self, sides: Mapping[str, Forced], target: str, draft: str = "", tables: str = "") -> None:
        self.sides, self.cells = dict(sides), Cells()
        self.checkpoint = read_checkpoint(target)
        self._tables = load_tables(tables, self.checkpoint.tokenizer) if tables else None
        self._line = Line(draft) if draft else None

    def run(self, prompt: int, text: str, name: str, rule: Sampling, methods: Sequence[str], num_tokens: int) -> None:
        """Count what comes of one prompt under every method; the plain one goes first, the others are held to it."""
        limits, end = Limits(num_tokens, self.checkpoint.max_positions, SIZES[-1]), min(self.checkpoint.eos_ids)
        plain: dict[str, list[Rows]] = {side: [] for side in self.sides}
        for method in methods:
            context = Context(self.checkpoint.tokenizer.encode(text).ids)
            proposer = self._proposer(method, [own.target_tokens[0] for own in plain[EXACT]])
            for tree, accepted, rows in follow(self.sides, proposer, context, rule, limits, end):
                step, first = Step(prompt, len(context), tree, accepted.path, rows), len(context.output)
                alone = {
                    side: _joined(own[first : first + len(accepted.path) + 1]) for side, own in plain.items() if own
                }
                label = method.split(":")[0]
                if label != Made.name or tree.num_nodes:  # at the text's last token there is no tree to make
                    self._count(name, label, step, alone if method != METHODS[0] else {}, rule)
                if method == METHODS[0]:
                    for side, own in rows.items():
                        plain[side].append(own)
            proposer.close()

    def _count(self, name: str, method: str, step: Step, plain: Mapping[str, Rows], rule: Sampling) -> None:
        size = next(size for size in SIZES if size >= step.tree.num_nodes)
        exact = {side: step.rows[EXACT] for side in step.rows if side != EXACT}
        for against, others in ((EXACT, exact), (PLAIN, plain)):
            for side, other in others.items():
                self._add((name, side, against, method, size), compare(step, step.rows[side], other, rule))

    def _add(self, key: Key, tally: Tally) -> None:
        self.cells.setdefault(key, Tally()).add(tally)

    def _proposer(self, method: str, said: Sequence[int]) -> Proposer:
        name, _, config = method.partition(":")
        if name == Made.name:
            return Made(int(config), said, self.checkpoint.vocab_size)
        materials = ProposerDependencies(
            lambda _: self._line,  # type: ignore[arg-type, return-value]
            self.checkpoint.vocab_size,
            num_parameters=self.checkpoint.num_parameters,
            tables=self._tables,
        )
        return select_method(name, config, frozenset({"draft"}), {}).proposer(materials)


def _joined(rows: Sequence[Rows]) -> Rows:
    return Rows(
        [pick for own in rows for pick in own.target_tokens],
        torch.cat([own.logits for own in rows] or [torch.empty(0)]),
    )


def merged(cells: Mapping[Key, Tally], kept: Sequence[int]) -> dict[tuple[Any, ...], Tally]:
    """Return the counts by some parts of the key, given by their numbers, the other parts together.

    Methods come by the same places of one text, and no method twice (nor made trees of one size): the most picks of
    one method are at distinct places.
    """
    result: dict[tuple[Any, ...], Tally] = {}
    target_tokens: Counter[tuple[Any, ...]] = Counter()
    for key, cell in cells.items():
        group = tuple(key[i] for i in kept)
        tally = result.setdefault(group, Tally())
        tally.add(cell)
        source = (*group, key[3], key[4] if key[3] == Made.name else None)
        target_tokens[source] += cell.target_tokens
        tally.places = max(tally.places, target_tokens[source])
    return {group: result[group] for group in sorted(result, key=_place)}


def _place(key: Sequence[Any]) -> list[Any]:
    """Return what sorts keys: names by the order in which they are measured, sizes by value."""
    names = [*SAMPLINGS, EXACT, "float32", "bfloat16", PLAIN, *(method.split(":")[0] for method in METHODS)]
    return [(part, "") if isinstance(part, int) else (_index(names, part), part) for part in key]


def _index(names: Sequence[str], name: str) -> int:
    return names.index(name) if name in names else len(names)
