"""Changes the logits of many requests at once: every kind of change is a few operations on the device for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from orchestrator.core.arrays import BoolArray
from orchestrator.core.sampling_params import Sampling
from runtime.engine.staging import stage

#: On a CPU, requests are changed together only as long as its cache holds this many logits of theirs.
MAX_CPU_NUMBERS = 1 << 18


class Changes(NamedTuple):
    """What the processors of one request change in its n rows.

    counts: tokens (k,), occurs (n, k) and counts (n, k), as `TokenCounts.along` returns them; None without penalties.
    legal: (n, V), whether the grammar allows a token; None without a grammar. bad_ends, early_ends: the ids that each
    row forbids, because they complete a bad word or end the output before min_tokens; empty if no row forbids any.
    """

    num_rows: int
    sampling: Sampling
    counts: tuple[np.ndarray, np.ndarray, np.ndarray] | None
    legal: BoolArray | None
    bad_ends: Sequence[Sequence[int]]
    early_ends: Sequence[Sequence[int]]


class _Request(NamedTuple):
    """The changes of a request, and the numbers of its rows among those that are changed together."""

    changes: Changes
    rows: np.ndarray


def processed(logits: Sequence[Tensor], changes: Sequence[Changes | None]) -> list[Tensor]:
    """Return the processed logits of every request, (n, V) float64; where nothing changes, the logits themselves.

    logits: per request (n, V), not changed. A mask is ignored in a row where it would forbid every token.
    Invariant: a row depends only on itself and on its own request.
    """
    result = list(logits)
    for own in _together(logits, [index for index, each in enumerate(changes) if each is not None]):
        parts = _changed([logits[index] for index in own], [each for index in own if (each := changes[index])])
        for index, part in zip(own, parts, strict=True):
            result[index] = part
    return result


def _together(logits: Sequence[Tensor], indices: Sequence[int]) -> Iterator[list[int]]:
    """Yield the requests whose rows are changed together."""
    own: list[int] = []
    size = 0
    for index in indices:
        size += logits[index].numel()
        if own and logits[index].device.type == "cpu" and size > MAX_CPU_NUMBERS:
            yield own
            own, size = [], logits[index].numel()
        own.append(index)
    if own:
        yield own


def _changed(logits: Sequence[Tensor], changes: Sequence[Changes]) -> Sequence[Tensor]:
    """Do the same for requests that all have changes, in one tensor."""
    starts = np.cumsum([0, *(each.num_rows for each in changes)]).tolist()
    requests = [_Request(each, np.arange(*own)) for each, own in zip(changes, pairwise(starts), strict=True)]
    rows = torch.cat([*logits]).double() if len(logits) > 1 else logits[0].to(torch.float64, copy=True)
    edits = [(edit, arrays) for arrays_of, edit in _KINDS if (arrays := arrays_of(requests, rows.shape[-1]))]
    staged = iter(stage([array for _, arrays in edits for array in arrays], rows.device))
    for edit, arrays in edits:
        rows = edit(rows, *islice(staged, len(arrays)))
    return rows.tensor_split(starts[1:-1])


# For each kind of change: its arrays, empty if no request asks for it, and what it does with them on the device. Places
# are indices into the flat logits.


def _penalties(requests: Sequence[_Request], vocab_size: int) -> list[np.ndarray]:
    """Return the places of the tokens that occur, the factors of their logits, and the two subtrahends."""
    columns: list[tuple[np.ndarray, ...]] = []
    for (_, sampling, counts, *_), rows in requests:
        if counts:
            tokens, occurs, times = counts
            places = rows[:, None] * vocab_size + tokens
            factors = np.where(occurs, sampling.repetition_penalty, 1.0)
            subtrahends = sampling.frequency_penalty * times, sampling.presence_penalty * (times > 0)
            columns.append((places, factors, *subtrahends))
    return [np.concatenate([part.ravel() for part in parts]) for parts in zip(*columns, strict=True)]


def _penalise(logits: Tensor, places: Tensor, factors: Tensor, frequency: Tensor, presence: Tensor) -> Tensor:
    found = logits.view(-1)[places]
    # Not by a Python number: CUDA would multiply with its reciprocal, which gives other bits.
    changed = torch.where(found > 0, found / factors, found * factors) - frequency - presence
    logits.view(-1)[places] = changed
    return logits


def _biases(requests: Sequence[_Request], vocab_size: int) -> list[np.ndarray]:
    """Return the places of the biased tokens, each once, and their weights."""
    places, weights = [], []
    for changes, rows in requests:
        if bias := changes.sampling.logits_options.bias:
            tokens, own = zip(*bias, strict=True)
            places.append(_places(rows, [tokens] * len(rows), vocab_size))
            weights.append(np.tile(np.array(own, np.float64), len(rows)))
    return [np.concatenate(places), np.concatenate(weights)] if places else []


def _add(logits: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    logits.view(-1).index_add_(0, places, weights)
    return logits


def _grammars(requests: Sequence[_Request], vocab_size: int) -> list[np.ndarray]:
    """Return the rows with a grammar, and what it allows in them, (k, V) bool."""
    guided = [(rows, changes.legal) for changes, rows in requests if changes.legal is not None]
    return [np.concatenate(parts) for parts in zip(*guided, strict=True)]


def _allow_legal(logits: Tensor, rows: Tensor, legal: Tensor) -> Tensor:
    allowed = torch.zeros_like(logits, dtype=torch.bool)
    allowed[rows] = legal
    return _forbid(logits, ~allowed)


def _allowed(requests: Sequence[_Request], vocab_size: int) -> list[np.ndarray]:
    lists = [(rows, [own] * len(rows)) for each, rows in requests if (own := each.sampling.logits_options.allowed)]
    return _all_places(lists, vocab_size)


def _allow_places(logits: Tensor, places: Tensor) -> Tensor:
    return _forbid(logits, ~_marked(logits, places))


def _bad_ends(requests: Sequence[_Request], vocab_size: int) -> list[np.ndarray]:
    return _all_places([(rows, each.bad_ends) for each, rows in requests if each.bad_ends], vocab_size)


def _early_ends(requests: Sequence[_Request], vocab_size: int) -> list[np.ndarray]:
    return _all_places([(rows, each.early_ends) for each, rows in requests if each.early_ends], vocab_size)


def _forbid_places(logits: Tensor, places: Tensor) -> Tensor:
    return _forbid(logits, _marked(logits, places))


def _forbid(logits: Tensor, forbidden: Tensor) -> Tensor:
    """Mask tokens, except in rows where that would leave none; so a row that allows none is one without a mask."""
    masked = logits.masked_fill(forbidden, -torch.inf)
    leaves_a_token = masked.isfinite().any(dim=-1, keepdim=True)
    return torch.where(leaves_a_token, masked, logits)


def _marked(logits: Tensor, places: Tensor) -> Tensor:
    """Return (N, V) bool, True at the places."""
    flat = torch.zeros(logits.numel(), dtype=torch.bool, device=logits.device)
    return flat.index_fill_(0, places, True).view_as(logits)


def _all_places(lists: Sequence[tuple[np.ndarray, Sequence[Sequence[int]]]], vocab_size: int) -> list[np.ndarray]:
    return [np.concatenate([_places(rows, ids, vocab_size) for rows, ids in lists])] if lists else []


def _places(rows: np.ndarray, ids: Sequence[Sequence[int]], vocab_size: int) -> np.ndarray:
    """Return the places of the ids of each row, (k,) int64."""
    columns = np.fromiter(chain.from_iterable(ids), np.int64)
    return np.repeat(rows, [len(own) for own in ids]) * vocab_size + columns


_KINDS: tuple[tuple[Callable[[Sequence[_Request], int], list[np.ndarray]], Callable[..., Tensor]], ...] = (
    (_penalties, _penalise),
    (_biases, _add),
    (_grammars, _allow_legal),
    (_allowed, _allow_places),
    (_bad_ends, _forbid_places),
    (_early_ends, _forbid_places),
)
