"""The likeliest tokens after each row by a head's own law q, ranked as the target will choose among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from orchestrator.noise import Stream
from orchestrator.types import Rule, Sampling
from runtime import sampling as rules
from runtime.noise import gumbel, seed_words

# Where the target takes an argmax, of its logits or of log p + noise, a head's best guess is right far oftener than its
# probability says, and trees that go by that are too wide (docs/methods/eagle.md, Confidence).
SHARPNESS = 0.3


class Ranked(NamedTuple):
    """The best tokens of each row, the best first: ids (n, k) int64, and their log-confidence (n, k) float64 ≤ 0."""

    ids: Tensor
    scores: Tensor


def rank(
    logits: Tensor, positions: Sequence[int], samplings: Sequence[Sampling], k: int, ids: Tensor | None = None
) -> Ranked:
    """Return the k best tokens of every row.

    logits: (n, V). positions: n, of the token that is drafted. ids: (V,), tokens of the columns; None = 0 … V − 1.
    Law: the score is log q. Where the target picks an argmax (at temperature 0, and under `coupled`, where the target's
    own noise is added) it is sharpened and normalised anew, so that with q = p the first is what the target will pick.
    Tokens outside q's support score −inf.
    """
    scores = _log_q(logits.double(), samplings)
    if noisy := [row for row, s in enumerate(samplings) if not s.greedy and s.rule is Rule.COUPLED]:
        tokens = torch.arange(scores.shape[-1], device=scores.device) if ids is None else ids
        places = [(samplings[row].seed, positions[row]) for row in noisy]
        scores[noisy] += _noise(places, tokens)
    if picked := [row for row, s in enumerate(samplings) if s.greedy or s.rule is Rule.COUPLED]:
        scores[picked] = (scores[picked] / SHARPNESS).log_softmax(dim=-1)
    top = scores.topk(min(k, scores.shape[-1]), dim=-1)
    return Ranked(top.indices if ids is None else ids[top.indices], top.values)


def _log_q(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Return log q of every row, (n, V) float64; greedy rows keep their whole law: ranks below the first count, too."""
    drawn = [row for row, s in enumerate(samplings) if not s.greedy]
    if len(drawn) == len(samplings):
        return rules.log_p(logits, samplings)
    result = logits.log_softmax(dim=-1)
    if drawn:
        result[drawn] = rules.log_p(logits[drawn], [samplings[row] for row in drawn])
    return result


def _noise(places: Sequence[tuple[int, int]], tokens: Tensor) -> Tensor:
    """Return the target's noise of these (seed, position), (n, V); nodes of one depth share theirs."""
    unique = list(dict.fromkeys(places))
    key = seed_words([seed for seed, _ in unique], tokens.device)
    column = torch.tensor([[position] for _, position in unique], device=tokens.device)
    noise = gumbel(key, column, tokens[None], Stream.PICK)
    return noise[[unique.index(place) for place in places]]
