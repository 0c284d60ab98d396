"""A drafter's call and its answer as flat tensors (docs/wire.md, Drafter wire); knows neither Triton nor torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orchestrator.core.errors import EngineError
from orchestrator.core.messages.context import Delta, pack_delta, unpack_delta
from orchestrator.core.messages.sampling import pack_sampling, unpack_sampling
from orchestrator.core.messages.tensors import (
    Incoming,
    Tensors,
    bounded,
    ids,
    pack_ids,
    pack_nonzero,
    pack_scalars,
    scalar,
    table,
    unpack_features,
)
from orchestrator.core.messages.tree import pack_tree, unpack_q, unpack_tree
from orchestrator.core.sampling.sampled_drafts import MAX_CANDIDATES
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.static_trees import MAX_WIDTH
from orchestrator.core.tree import MAX_NODES, TokenTree
from orchestrator.core.types import NO_HEAD_INPUT, DraftResponse, HeadInput


@dataclass(frozen=True, eq=False)
class DraftRequest:
    """One call of a drafter.

    head: what a drafter that reads the target's hidden states needs besides the context.
    deadline_ms: how long the drafter may take, counted from when it receives the call; 0 = the engine's default limit.
    """

    delta: Delta
    sampling: Sampling
    max_nodes: int
    max_depth: int
    head: HeadInput = NO_HEAD_INPUT
    deadline_ms: int = 0


@dataclass(eq=False)
class DrafterUse:
    """How an engine keeps calling a drafter of its own process for a request, without the request's proposer.

    drafter: a `LocalDrafter`. request: the last call; the next ones have the same sampling, shape and limits.
    following: the draft after the last step of a burst; None if the burst has left no draft.
    num_read: the number of tokens that the drafter has read after the burst. The first hidden state that a head lacks
    is that of the last of these tokens.
    """

    drafter: object
    request: DraftRequest
    following: TokenTree | None = None
    num_read: int = 0


def pack_draft_request(request: DraftRequest) -> Tensors:
    """Pack a drafter's call."""
    return (
        pack_delta(request.delta)
        | pack_sampling(request.sampling)
        | pack_scalars(max_nodes=request.max_nodes, max_depth=request.max_depth)
        | _pack_head_input(request.head)
        | pack_nonzero(deadline_ms=request.deadline_ms)
    )


def unpack_draft_request(tensors: Incoming) -> DraftRequest:
    """Unpack a drafter's call; raise EngineError if a tensor is missing or invalid."""
    return DraftRequest(
        unpack_delta(tensors),
        unpack_sampling(tensors),
        bounded(tensors, "max_nodes", MAX_NODES),
        bounded(tensors, "max_depth", MAX_NODES),
        _unpack_head_input(tensors),
        scalar(tensors, "deadline_ms", 0),
    )


def _pack_head_input(head: HeadInput) -> Tensors:
    tensors = pack_ids("choice_ranks", head.choices.tokens) | pack_ids("choice_parents", head.choices.parents)
    tensors |= pack_nonzero(width=head.width, draws=int(head.draws))
    shares = {"min_prob": head.min_prob, "sharpness": head.sharpness}
    tensors |= {name: np.array([share]) for name, share in shares.items() if share}
    if head.features is None or not len(head.features):
        return tensors
    return tensors | {"features": head.features} | pack_scalars(features_start=head.features_start)


def _unpack_head_input(tensors: Incoming) -> HeadInput:
    ranks, parents = ids(tensors, "choice_ranks"), ids(tensors, "choice_parents")
    choices = TokenTree.checked(ranks, parents, MAX_CANDIDATES, MAX_NODES)
    features = unpack_features(tensors)
    min_prob, sharpness = (_unpack_share(tensors, name) for name in ("min_prob", "sharpness"))
    width = bounded(tensors, "width", MAX_WIDTH, 0)
    draws = bool(bounded(tensors, "draws", 1, 0))
    start = scalar(tensors, "features_start", 0)
    return HeadInput(features, start, choices, width, min_prob, draws, sharpness)


def _unpack_share(tensors: Incoming, name: str) -> float:
    given = table(tensors, name, np.float64, 1, 1)
    share = 0.0 if given is None else float(given[0])
    if not 0.0 <= share <= 1.0:
        raise EngineError(f"{name} must be in 0..1, got {share} in an engine call")
    return share


def pack_draft_response(response: DraftResponse) -> Tensors:
    """Pack a drafter's answer."""
    return pack_tree(response.tree, response.q) | pack_scalars(cached_len=response.cached_len)


def unpack_draft_response(tensors: Incoming, vocab_size: int, max_nodes: int) -> DraftResponse:
    """Unpack a drafter's answer; raise EngineError if its tree is invalid. Its q is not checked here."""
    tree = unpack_tree(tensors, vocab_size, max_nodes)
    return DraftResponse(tree, unpack_q(tensors), scalar(tensors, "cached_len", 0))
