"""The distribution of docs/sampling.md on a GPU (torch, float64), for many rows, each with its own sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from orchestrator.core.noise import Stream
from orchestrator.core.sampling_params import Sampling
from runtime.engine.sampling.noise import draw, seed_words
from runtime.engine.staging import fetch, staged

NUCLEUS_GUESS = 256


def target_tokens(logits: Tensor, positions: Sequence[int], samplings: Sequence[Sampling]) -> list[int]:
    """Return the target token of every row: argmax(log p + noise), at temperature 0 the argmax; ties to the lowest id.

    logits: (n, V) in the model's dtype. positions: (n,), absolute position of the token that each row decides.
    samplings: (n,). Returns (n,) token ids.
    """
    if all(sampling.greedy for sampling in samplings):
        return logits.argmax(dim=-1).tolist()
    key = seed_words([sampling.seed for sampling in samplings], logits.device)
    at = staged(positions, logits.device)[:, None]
    return draw(log_p(logits.double(), samplings), key, at, Stream.TARGET, torch.zeros_like(at)).tolist()


def log_p(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Return log p per row, (n, V) float64, −inf outside its support.

    logits: (n, V) float64. samplings: (n,).
    Invariant: up to the rounding of torch's log and exp, which is below 1e-12, each row is that of docs/sampling.md.
    """
    rows = [row for row, sampling in enumerate(samplings) if not sampling.greedy]
    if len(rows) == len(samplings):
        return _log_p(logits, samplings)
    result = torch.full_like(logits, -torch.inf).scatter_(-1, logits.argmax(dim=-1, keepdim=True), 0.0)
    if rows:
        index = staged(rows, logits.device)
        result[index] = _log_p(logits[index], [samplings[row] for row in rows])
    return result


def _log_p(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Return log p per row, (n, V) float64; no row is greedy."""
    result = (logits / _column(logits, [sampling.temperature for sampling in samplings])).log_softmax(dim=-1)
    for applies, truncate in _TRUNCATIONS:
        rows = [row for row, sampling in enumerate(samplings) if applies(sampling, logits.shape[-1])]
        if len(rows) == len(samplings):
            result = truncate(result, samplings)
        elif rows:
            index = staged(rows, logits.device)
            result[index] = truncate(result[index], [samplings[row] for row in rows])
    return result


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    return staged(np.array(values, np.float64), like.device)[:, None]


def _keep(log_probs: Tensor, kept: Tensor) -> Tensor:
    return log_probs.masked_fill(~kept, -torch.inf).log_softmax(dim=-1)


def _top_k(log_probs: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    limits = [s.top_k for s in samplings]
    top = log_probs.topk(max(limits), dim=-1).values
    kth = top.gather(-1, staged([[k - 1] for k in limits], log_probs.device))
    return _keep(log_probs, log_probs >= kth)


def _top_p(log_probs: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    ordered, num_kept = _nucleus(log_probs, _column(log_probs, [s.top_p for s in samplings]))
    last = ordered.gather(-1, num_kept - 1)
    # Of the tokens that tie with the last one kept, keep only as many as there is room for, the lowest ids first.
    equal = log_probs == last
    room = num_kept - (log_probs > last).sum(dim=-1, keepdim=True)
    return _keep(log_probs, (log_probs > last) | (equal & (equal.cumsum(dim=-1) <= room)))


def _nucleus(log_probs: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the k largest log-probabilities in order, (n, k), and how many of them each nucleus has, (n, 1).

    limits: (n, 1), the mass of each nucleus. k is NUCLEUS_GUESS if that suffices, as it almost always does, else V,
    which means sorting the vocabulary.
    """
    vocab_size = log_probs.shape[-1]
    for size in (min(NUCLEUS_GUESS, vocab_size), vocab_size):
        ordered = log_probs.topk(size, dim=-1).values
        num_kept = _num_kept(ordered, limits)
        if size == vocab_size or bool((num_kept < size).all()):
            break
    return ordered, num_kept


def _num_kept(ordered: Tensor, limits: Tensor) -> Tensor:
    """Return how many of the first tokens reach a mass, (n, 1); ordered: (n, k) log-probabilities. limits: (n, 1)."""
    reached = ordered.exp().cumsum(dim=-1)[:, :-1] >= limits
    return 1 + (reached.cumsum(dim=-1) == 0).sum(dim=-1, keepdim=True)


def _min_p(log_probs: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    floor = log_probs.amax(dim=-1, keepdim=True) + _column(log_probs, [s.min_p for s in samplings]).log()
    return _keep(log_probs, log_probs >= floor)


def _typical_p(log_probs: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    probs = log_probs.exp()
    negative_entropy = (probs * torch.where(probs > 0.0, log_probs, 0.0)).sum(dim=-1, keepdim=True)
    order = (log_probs - negative_entropy).abs().sort(dim=-1, stable=True).indices
    num_kept = _num_kept(log_probs.gather(-1, order), _column(log_probs, [s.typical_p for s in samplings]))
    kept = torch.arange(log_probs.shape[-1], device=log_probs.device) < num_kept
    return _keep(log_probs, torch.zeros_like(kept).scatter(-1, order, kept))


#: In order of application: whether a sampling uses the truncation for a vocabulary of this size, and the function that
#: truncates rows of log p, (n, V).
_TRUNCATIONS: tuple[tuple[Callable[[Sampling, int], bool], Callable[[Tensor, Sequence[Sampling]], Tensor]], ...] = (
    (lambda s, vocab_size: 0 < s.top_k < vocab_size, _top_k),
    (lambda s, _: s.top_p < 1.0, _top_p),
    (lambda s, _: s.min_p > 0.0, _min_p),
    (lambda s, _: s.typical_p < 1.0, _typical_p),
)


def log_probs_of(logits: Tensor, tokens: Sequence[int]) -> list[float]:
    """Return the log-probability of one token per row by the raw logits, in float64.

    logits: (n, V). tokens: (n,) ids.
    """
    column = staged(tokens, logits.device)[:, None]
    return logits.double().log_softmax(dim=-1).gather(-1, column)[:, 0].tolist()


def top_log_probs(logits: Tensor, num_top: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the most probable tokens of every row by the raw logits, in order; ties go to the lowest id.

    logits: (n, V). Returns ids (n, k) int32 and log-probabilities (n, k) float64; k = num_top, at most V.
    """
    order = top_ids(logits, num_top)
    ids, log_probs = fetch([order.int(), logits.double().log_softmax(dim=-1).gather(-1, order)])
    return ids, log_probs


def top_ids(logits: Tensor, num_top: int) -> Tensor:
    """Return only the ids of `top_log_probs`, (n, k) int64.

    The order is that of the logits: the log-probabilities of unequal logits may be rounded to the same number, and the
    first token is to be the argmax.
    """
    return logits.sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
