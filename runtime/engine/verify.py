"""Verifies the trees of a target pass: for each request the accepted path, the next token and the target tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from orchestrator.core.context import Context
from orchestrator.core.errors import ServingError
from orchestrator.sampling.accept import AcceptedPath
from runtime.sampling.accept import AcceptInput
from runtime.sampling.logits_processors import LogitsProcessors
from runtime.sampling.served import decide


@dataclass(frozen=True, eq=False)
class VerifyInput(AcceptInput):
    """One request's step.

    context: the committed tokens. logits_processors: None when the request changes no logits.
    wants_target_tokens: return the target's tokens at the root and every node.
    """

    context: Context
    logits_processors: LogitsProcessors | None
    wants_target_tokens: bool


class VerifyResult(NamedTuple):
    """target_tokens: (m + 1,), the target's own at root and nodes; None when the request does not want them."""

    accepted: AcceptedPath
    target_tokens: list[int] | None


def verify(inputs: Sequence[VerifyInput], logits: Sequence[Tensor]) -> list[VerifyResult | ServingError]:
    """Verify the trees of a pass; a request whose processors fail (its grammar grew too complex) gets the error.

    logits: per input (m + 1, V) in the model's dtype, of the root and the nodes; not changed.
    Invariant: a result depends on its own input and rows alone.
    """
    rows = list(logits)
    errors: dict[int, ServingError] = {}
    for index, each in enumerate(inputs):
        if each.logits_processors is not None:
            try:
                rows[index] = each.logits_processors.apply(rows[index], each.context, each.prefix_len, each.tree.paths)
            except ServingError as error:
                errors[index] = error
    sound = [index for index in range(len(inputs)) if index not in errors]
    wanted = [inputs[index].wants_target_tokens for index in sound]
    found = decide([inputs[index] for index in sound], [rows[index] for index in sound], wanted)
    results = iter(VerifyResult(AcceptedPath(path, token), target_tokens) for path, token, target_tokens in found)
    return [errors.get(index) or next(results) for index in range(len(inputs))]
