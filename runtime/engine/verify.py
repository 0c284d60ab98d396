"""What a target pass decides for each of its requests: the accepted path, the next token, the target tokens."""

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
    """One request's step. context: the committed tokens. logits_processors: None when the request changes no logits.

    wants_target_tokens: whether the result must have them even if the acceptance rule does not need them.
    """

    context: Context
    logits_processors: LogitsProcessors | None
    wants_target_tokens: bool

    @property
    def positions(self) -> list[int]:
        """Absolute position of the token that each row of logits, root and nodes, is about."""
        positions: list[int] = (self.tree.depths + self.prefix_len).tolist()
        return positions

    @property
    def samplings(self) -> list[Sampling]:
        """The request's sampling, once for each row."""
        return [self.sampling] * (self.tree.num_nodes + 1)

    @property
    def is_coupled(self) -> bool:
        """True when the target tokens alone decide; under `engine` this engine decides as it would by itself."""
        return self.sampling.rule in (Rule.COUPLED, Rule.ENGINE)

    def processed(self, logits: Tensor) -> Tensor:
        """Return (m + 1, V) logits after the request's processors, in float64 if there are any."""
        if self.logits_processors is None:
            return logits
        return self.logits_processors.apply(logits, self.context, self.prefix_len, self.tree.paths)


class VerifyResult(NamedTuple):
    """target_tokens: of the root and every node; None when neither the rule nor the request needs them."""

    accepted: AcceptedPath
    target_tokens: list[int] | None


def verify(inputs: Sequence[VerifyInput], logits: Sequence[Tensor]) -> list[VerifyResult | ServingError]:
    """Verify the trees of a pass; an error, such as a grammar that has grown too complex, is its own request's alone.

    logits: per input (m + 1, V) in the model's dtype, of the root and the nodes; not changed.
    Invariant: a result depends on its own input and rows alone.
    """
    rows = list(logits)
    errors: dict[int, ServingError] = {}
    for index, each in enumerate(inputs):
        try:
            rows[index] = each.processed(rows[index])
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
