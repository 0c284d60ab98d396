"""The most probable tokens after each row by a head's distribution q, ranked as the target will choose among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from orchestrator.core.sampling_params import Rule, Sampling
from runtime.engine.sampling.served import log_p, target_noise
from runtime.engine.staging import staged

# Only this many of a row's V tokens get noise and a float64 sort, which would dominate the cost at V = 128,256.
CANDIDATES = 256


class Ranked(NamedTuple):
    """The k best tokens of each row, the best first.

    ids: (n, k) int64. scores: (n, k) float64, the log-confidence of each, at most 0.
    """

    ids: Tensor
    scores: Tensor


def rank(
    logits: Tensor,
    positions: Sequence[int],
    samplings: Sequence[Sampling],
    k: int,
    ids: Tensor | None = None,
    sharpness: Sequence[float] = (),
) -> Ranked:
    """Return the k best tokens of every row.

    logits: (n, V) float. positions: n, the position of each drafted token. samplings: n, those of the rows' requests.
    ids: (V,) int64, the token of each column; None means 0 … V − 1. sharpness: n, the divisor of a row's scores where
    the target takes an argmax (docs/methods/eagle.md, Confidence); empty: 1 for all.
    Of equal scores that of the first column comes first.
    Invariant: a score is log q, with q over the row's CANDIDATES most probable tokens. Where the target takes an argmax
    (at temperature 0, and under `coupled`, where the target's own noise is added), scores are sharpened and normalised
    again, so that if q = p the first token is the one that the target will choose. Tokens outside the support of q
    score −inf.
    """
    columns = logits.topk(min(max(k, CANDIDATES), logits.shape[-1]), dim=-1, sorted=False).indices.sort().values
    tokens = columns if ids is None else ids[columns]
    scores = _log_q(logits.gather(-1, columns).double(), samplings)
    if noisy := [row for row, s in enumerate(samplings) if not s.greedy and s.rule is Rule.COUPLED]:
        index = staged(noisy, logits.device)
        seeds, at = [samplings[row].seed for row in noisy], [positions[row] for row in noisy]
        scores[index] += target_noise(seeds, at, tokens[index])
    if argmax := [row for row, s in enumerate(samplings) if s.greedy or s.rule is Rule.COUPLED]:
        divisors = staged([sharpness[row] if sharpness else 1.0 for row in argmax], logits.device)
        index = staged(argmax, logits.device)
        scores[index] = (scores[index] / divisors[:, None]).log_softmax(dim=-1)
    top = scores.sort(dim=-1, descending=True, stable=True)
    return Ranked(tokens.gather(-1, top.indices[:, :k]), top.values[:, :k])


def _log_q(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Return log q of every row, (n, C) float64; greedy rows are not truncated, since lower ranks count too."""
    sampled = [row for row, s in enumerate(samplings) if not s.greedy]
    if len(sampled) == len(samplings):
        return log_p(logits, samplings)
    result = logits.log_softmax(dim=-1)
    if sampled:
        index = staged(sampled, logits.device)
        result[index] = log_p(logits[index], [samplings[row] for row in sampled])
    return result
