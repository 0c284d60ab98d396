"""Verifies the trees of a target pass: for each request the accepted path, the next token and the target tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from orchestrator.core.accept import AcceptedPath
from orchestrator.core.arrays import BoolArray
from orchestrator.core.context import Context
from runtime.engine.sampling.accept import AcceptInput
from runtime.engine.sampling.changes import processed
from runtime.engine.sampling.logits_processors import LogitsProcessors
from runtime.engine.sampling.served import decide


@dataclass(frozen=True, eq=False)
class VerifyInput(AcceptInput):
    """One request's step.

    context: the committed tokens. logits_processors: None if the request changes no logits.
    wants_target_tokens: return the target's tokens after the root and every node.
    legal: (m + 1, V), the tokens that the grammar allows after the root and every node; None without a grammar.
    """

    context: Context
    logits_processors: LogitsProcessors | None
    wants_target_tokens: bool
    legal: BoolArray | None = None


class VerifyResult(NamedTuple):
    """target_tokens: (m + 1,), the target's own after root and nodes; None if the request does not want them."""

    accepted: AcceptedPath
    target_tokens: list[int] | None


def verify(inputs: Sequence[VerifyInput], logits: Sequence[Tensor]) -> list[VerifyResult]:
    """Verify the trees of a pass.

    logits: per input (m + 1, V) in the model's dtype, after the root and each node; not changed.
    Invariant: a result depends only on its own input and rows.
    """
    changes = [
        each.logits_processors.changes(each.context, each.prefix_len, each.tree.paths, each.legal)
        if each.logits_processors
        else None
        for each in inputs
    ]
    rows = processed(logits, changes)
    found = decide(inputs, rows, [each.wants_target_tokens for each in inputs])
    return [VerifyResult(AcceptedPath(path, token), target_tokens) for path, token, target_tokens in found]
