"""Verifies the trees of a target pass: for each request the accepted path, the next token and the target tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from orchestrator.core.context import Context
from orchestrator.core.errors import ServingError
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.sampling.accept import AcceptedPath, accept_coupled
from runtime.sampling import distribution
from runtime.sampling.accept import AcceptInput, accepted_paths
from runtime.sampling.logits_processors import LogitsProcessors


@dataclass(frozen=True, eq=False)
class VerifyInput(AcceptInput):
    """One request's step.

    context: the committed tokens. logits_processors: None when the request changes no logits.
    wants_target_tokens: return the target tokens even if the acceptance rule does not need them.
    """

    context: Context
    logits_processors: LogitsProcessors | None
    wants_target_tokens: bool

    @property
    def positions(self) -> list[int]:
        """For each row of logits, root and nodes, the absolute position of the token that it predicts."""
        positions: list[int] = (self.tree.depths + self.prefix_len).tolist()
        return positions

    @property
    def samplings(self) -> list[Sampling]:
        """The request's sampling, once for each row."""
        return [self.sampling] * (self.tree.num_nodes + 1)

    @property
    def is_coupled(self) -> bool:
        """True when the target tokens alone decide; this engine's own rule, `Rule.ENGINE`, is `coupled`."""
        return self.sampling.rule in (Rule.COUPLED, Rule.ENGINE)


class VerifyResult(NamedTuple):
    """target_tokens: (m + 1,), for the root and every node; None when neither the rule nor the request needs them."""

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
    target_tokens = _target_tokens(inputs, rows)
    paths = _accepted_paths(inputs, rows, target_tokens)
    return [errors.get(i) or VerifyResult(paths[i], target_tokens.get(i)) for i in range(len(inputs))]


def _target_tokens(inputs: Sequence[VerifyInput], rows: list[Tensor]) -> dict[int, list[int]]:
    """Return the target tokens of the inputs that need them, by index.

    Rows after processors are float64, the others keep the model's dtype: joined, all would be copied to float64.
    """
    members = [i for i, each in enumerate(inputs) if each.is_coupled or each.wants_target_tokens]
    result: dict[int, list[int]] = {}
    for dtype in {rows[i].dtype for i in members}:
        group = [i for i in members if rows[i].dtype == dtype]
        positions = [position for i in group for position in inputs[i].positions]
        samplings = [sampling for i in group for sampling in inputs[i].samplings]
        tokens = iter(distribution.target_tokens(torch.cat([rows[i] for i in group]), positions, samplings))
        result |= {i: list(islice(tokens, len(rows[i]))) for i in group}
    return result


def _accepted_paths(
    inputs: Sequence[VerifyInput], rows: list[Tensor], target_tokens: dict[int, list[int]]
) -> dict[int, AcceptedPath]:
    """Return the accepted path of every input, by index: under `coupled` one by one, under the other rules together."""
    paths = {i: accept_coupled(each.tree, target_tokens[i]) for i, each in enumerate(inputs) if each.is_coupled}
    if others := [i for i in range(len(inputs)) if i not in paths]:
        samplings = [sampling for i in others for sampling in inputs[i].samplings]
        log_p = distribution.log_p(torch.cat([rows[i].double() for i in others]), samplings)
        paths |= zip(others, accepted_paths([inputs[i] for i in others], log_p), strict=True)
    return paths
