"""What a target pass decides for each of its requests: the accepted path, the next token, the target's own picks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from orchestrator.accept import Walk, accept_coupled
from orchestrator.context import Context
from orchestrator.errors import ServingError
from orchestrator.sampling_params import Rule
from runtime import accept, sampling
from runtime.shaping import Shaper


@dataclass(frozen=True, eq=False)
class Question:
    """A request's share of the logits, and what is asked about it.

    context: what stands before the drafts. shaper: what changes the logits, if anything does.
    """

    ask: accept.Ask
    context: Context
    shaper: Shaper | None
    want_picks: bool

    @property
    def num_rows(self) -> int:
        """Rows of logits: the root and the nodes."""
        return self.ask.tree.num_nodes + 1

    @property
    def is_coupled(self) -> bool:
        """True when the picks alone decide."""
        return self.ask.sampling.rule in (Rule.COUPLED, Rule.ENGINE)  # the latter: as this engine would by itself

    def shaped(self, logits: Tensor) -> Tensor:
        """Return (n, V) logits as the request wants them; in float64 where it changes any."""
        if self.shaper is None:
            return logits
        shaped = logits.to(torch.float64, copy=True)
        self.shaper.apply(shaped, self.context, self.ask.prefix_len, self.ask.tree.paths)
        return shaped


class Verdict(NamedTuple):
    """picks: of the root and every node, None when nobody needs them."""

    walk: Walk
    picks: list[int] | None


def decide(questions: Sequence[Question], logits: Tensor) -> list[Verdict | ServingError]:
    """Return the verdict on every question, or why there is none: a grammar that grew too complex, say.

    logits: (rows, V) in the model's dtype, root and nodes of every question, one behind the other.
    Law: a verdict depends on its own question and rows alone.
    """
    parts = list(logits.split([question.num_rows for question in questions]))
    errors: dict[int, ServingError] = {}
    for index, question in enumerate(questions):
        try:
            parts[index] = question.shaped(parts[index])
        except ServingError as error:
            errors[index] = error
    picks = _picks(questions, parts)
    walks = _walks(questions, parts, picks)
    return [errors.get(i) or Verdict(walk, own) for i, (walk, own) in enumerate(zip(walks, picks, strict=True))]


def _picks(questions: Sequence[Question], parts: list[Tensor]) -> list[list[int] | None]:
    """Return the target's pick at every row of those that need them; shaped parts are float64, the others go apart."""
    found: list[list[int] | None] = [None] * len(questions)
    for dtype in {part.dtype for part in parts}:
        asked = [i for i, q in enumerate(questions) if parts[i].dtype == dtype and (q.is_coupled or q.want_picks)]
        if asked:
            for index, own in zip(
                asked, _picked([questions[i] for i in asked], [parts[i] for i in asked]), strict=True
            ):
                found[index] = own
    return found


def _picked(questions: list[Question], parts: list[Tensor]) -> list[list[int]]:
    positions: list[int] = []
    rules = []
    for question in questions:
        positions += (question.ask.tree.depths + question.ask.prefix_len).tolist()
        rules += [question.ask.sampling] * question.num_rows
    flat = iter(sampling.picks(torch.cat(parts), positions, rules))
    return [[next(flat) for _ in range(question.num_rows)] for question in questions]


def _walks(questions: Sequence[Question], parts: list[Tensor], picks: list[list[int] | None]) -> list[Walk]:
    others = [i for i, question in enumerate(questions) if not question.is_coupled]
    walks: dict[int, Walk] = {}
    if others:
        rules = [questions[i].ask.sampling for i in others for _ in range(questions[i].num_rows)]
        log_p = sampling.log_p(torch.cat([parts[i].double() for i in others]), rules)
        walks = dict(zip(others, accept.walks([questions[i].ask for i in others], log_p), strict=True))
    return [
        accept_coupled(question.ask.tree, own) if own is not None and question.is_coupled else walks[i]
        for i, (question, own) in enumerate(zip(questions, picks, strict=True))
    ]
