"""The likeliest tokens after each row by a head's own law q, ranked as the target will choose among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from orchestrator.core.noise import Stream
from orchestrator.core.sampling_params import Rule, Sampling
from runtime.sampling import distribution
from runtime.sampling.noise import gumbel, seed_words

# Where the target takes an argmax, of its logits or of log p + noise, a head's best guess is right far oftener than its
# probability says, and trees that go by that are too wide (docs/methods/eagle.md, Confidence).
SHARPNESS = 0.3
# Of a row's V tokens: what a vocabulary of 128,256 costs beyond a first look is noise and sorting in float64.
CANDIDATES = 256


class Ranked(NamedTuple):
    """The best tokens of each row, the best first: ids (n, k) int64, and their log-confidence (n, k) float64 ≤ 0."""

    ids: Tensor
    scores: Tensor


def rank(
    logits: Tensor, positions: Sequence[int], samplings: Sequence[Sampling], k: int, ids: Tensor | None = None
) -> Ranked:
    """Return the k best tokens of every row.

    logits: (n, V). positions: n, of the token that is drafted. ids: (V,), tokens of the columns; None = 0 … V − 1.
    Invariant: the score is log q, q of the CANDIDATES likeliest tokens alone. Where the target picks an argmax (at
    temperature 0, and under `coupled`, where the target's own noise is added) it is sharpened and normalised anew, so
    that with q = p the first is what the target will pick. Tokens outside q's support score −inf.
    """
    best = logits.topk(min(max(k, CANDIDATES), logits.shape[-1]), dim=-1, sorted=False)
    tokens = best.indices if ids is None else ids[best.indices]
    scores = _log_q(best.values.double(), samplings)
    if noisy := [row for row, s in enumerate(samplings) if not s.greedy and s.rule is Rule.COUPLED]:
        scores[noisy] += _noise([(samplings[row].seed, positions[row]) for row in noisy], tokens[noisy])
    if picked := [row for row, s in enumerate(samplings) if s.greedy or s.rule is Rule.COUPLED]:
        scores[picked] = (scores[picked] / SHARPNESS).log_softmax(dim=-1)
    top = scores.topk(min(k, scores.shape[-1]), dim=-1)
    return Ranked(tokens.gather(-1, top.indices), top.values)


def _log_q(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Return log q of every row, (n, C) float64; greedy rows keep their whole law: ranks below the first count, too."""
    drawn = [row for row, s in enumerate(samplings) if not s.greedy]
    if len(drawn) == len(samplings):
        return distribution.log_p(logits, samplings)
    result = logits.log_softmax(dim=-1)
    if drawn:
        result[drawn] = distribution.log_p(logits[drawn], [samplings[row] for row in drawn])
    return result


def _noise(places: Sequence[tuple[int, int]], tokens: Tensor) -> Tensor:
    """Return the target's noise of each row's (seed, position) for its tokens, (n, C)."""
    key = seed_words([seed for seed, _ in places], tokens.device)
    column = torch.tensor([[position] for _, position in places], device=tokens.device)
    return gumbel(key, column, tokens, Stream.PICK)
