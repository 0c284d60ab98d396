"""Plain autoregressive generation, slow and obvious: the truth that every method is compared with."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import numpy as np

from orchestrator.sampling import pick
from orchestrator.types import FloatArray, Sampling

Logits = Callable[[Sequence[int]], FloatArray]


def generate(
    logits: Logits,
    prompt: Sequence[int],
    sampling: Sampling,
    max_tokens: int,
    stop_ids: Container[int] = (),
) -> list[int]:
    """Return the tokens that the target says after `prompt`, one forward pass each.

    logits: ids of a prefix → (V,) float64, the logits of the token that follows it.
    Law: at most max_tokens tokens; the first stop id ends the output and is its last token.
    """
    ids = list(prompt)
    while len(ids) < len(prompt) + max_tokens:
        row = logits(ids)[None, :]
        ids.append(int(pick(row, np.array([len(ids)]), sampling)[0]))
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt) :]
