"""What a target pass decides for each of its requests: the accepted path, the next token, the target's own picks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from orchestrator.core.context import Context
from orchestrator.core.errors import ServingError
from orchestrator.core.sampling_params import Rule
from orchestrator.sampling.accept import AcceptedPath, accept_coupled
from runtime.sampling import accept, distribution
from runtime.sampling.logits_processors import LogitsProcessors


@dataclass(frozen=True, eq=False)
class VerifyInput:
    """A request's share of the logits, and what is asked about it.

    context: what stands before the drafts. shaper: what changes the logits, if anything does.
    """

    accept_input: accept.AcceptInput
    context: Context
    logits_processors: LogitsProcessors | None
    wants_target_tokens: bool

    @property
    def num_rows(self) -> int:
        """Rows of logits: the root and the nodes."""
        return self.accept_input.tree.num_nodes + 1

    @property
    def is_coupled(self) -> bool:
        """True when the picks alone decide."""
        return self.accept_input.sampling.rule in (
            Rule.COUPLED,
            Rule.ENGINE,
        )  # the latter: as this engine would by itself

    def shaped(self, logits: Tensor) -> Tensor:
        """Return (n, V) logits as the request wants them; in float64 where it changes any."""
        if self.logits_processors is None:
            return logits
        shaped = logits.to(torch.float64, copy=True)
        self.logits_processors.apply(shaped, self.context, self.accept_input.prefix_len, self.accept_input.tree.paths)
        return shaped


class VerifyResult(NamedTuple):
    """picks: of the root and every node, None when nobody needs them."""

    accepted: AcceptedPath
    target_tokens: list[int] | None


def verify(questions: Sequence[VerifyInput], logits: Tensor) -> list[VerifyResult | ServingError]:
    """Return the verdict on every question, or why there is none: a grammar that grew too complex, say.

    logits: (rows, V) in the model's dtype, root and nodes of every question, one behind the other.
    Invariant: a verdict depends on its own question and rows alone.
    """
    parts = list(logits.split([question.num_rows for question in questions]))
    errors: dict[int, ServingError] = {}
    for index, question in enumerate(questions):
        try:
            parts[index] = question.shaped(parts[index])
        except ServingError as error:
            errors[index] = error
    target_tokens = _picks(questions, parts)
    walks = _walks(questions, parts, target_tokens)
    return [
        errors.get(i) or VerifyResult(walk, own) for i, (walk, own) in enumerate(zip(walks, target_tokens, strict=True))
    ]


def _picks(questions: Sequence[VerifyInput], parts: list[Tensor]) -> list[list[int] | None]:
    """Return the target's pick at every row of those that need them; shaped parts are float64, the others go apart."""
    found: list[list[int] | None] = [None] * len(questions)
    for dtype in {part.dtype for part in parts}:
        asked = [
            i for i, q in enumerate(questions) if parts[i].dtype == dtype and (q.is_coupled or q.wants_target_tokens)
        ]
        if asked:
            for index, own in zip(
                asked, _picked([questions[i] for i in asked], [parts[i] for i in asked]), strict=True
            ):
                found[index] = own
    return found


def _picked(questions: list[VerifyInput], parts: list[Tensor]) -> list[list[int]]:
    positions: list[int] = []
    rules = []
    for question in questions:
        positions += (question.accept_input.tree.depths + question.accept_input.prefix_len).tolist()
        rules += [question.accept_input.sampling] * question.num_rows
    flat = iter(distribution.target_tokens(torch.cat(parts), positions, rules))
    return [[next(flat) for _ in range(question.num_rows)] for question in questions]


def _walks(
    questions: Sequence[VerifyInput], parts: list[Tensor], target_tokens: list[list[int] | None]
) -> list[AcceptedPath]:
    others = [i for i, question in enumerate(questions) if not question.is_coupled]
    walks: dict[int, AcceptedPath] = {}
    if others:
        rules = [questions[i].accept_input.sampling for i in others for _ in range(questions[i].num_rows)]
        log_p = distribution.log_p(torch.cat([parts[i].double() for i in others]), rules)
        walks = dict(
            zip(others, accept.accepted_paths([questions[i].accept_input for i in others], log_p), strict=True)
        )
    return [
        accept_coupled(question.accept_input.tree, own) if own is not None and question.is_coupled else walks[i]
        for i, (question, own) in enumerate(zip(questions, target_tokens, strict=True))
    ]
