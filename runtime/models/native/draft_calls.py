"""The calls of drafters in native code: what a request asks for, and the arrays that hold several requests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from ctypes import Array
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from native.head_fields import DraftCallFields
from native.ranking import ranking_of
from orchestrator.core.arrays import Features, IdArray
from orchestrator.core.sampled_drafts import MAX_CANDIDATES
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import MAX_NODES, TokenTree


@dataclass(frozen=True, eq=False)
class NativeDraft:
    """What a head or, for a chain, a draft model needs to draft for one request.

    position: the position of the tokens below the root. choices: the shape of a static tree; bare for a dynamic tree of
    `width`. tokens: the tokens of the context rows to read, the root last. features: the target's, one row for each.
    max_s: time budget in seconds; a level that would probably exceed it is not begun. min_score: the lowest
    log-confidence of a path. draws: the nodes are sampled from q. sharpness: how sure the drafter is of its guesses.
    blocks, first_slot, gap: for a head with a cache, its blocks, the slot of the first row, and slots without a row.
    """

    sampling: Sampling
    position: int
    max_nodes: int
    max_depth: int
    width: int
    choices: TokenTree
    tokens: Sequence[int]
    features: Features
    max_s: float
    blocks: Sequence[int] = ()
    first_slot: int = 1
    gap: range = range(0)
    min_score: float = -math.inf
    draws: bool = False
    sharpness: float = 1.0


def calls_of(drafts: Sequence[NativeDraft]) -> Array[DraftCallFields]:
    """Return the fields of each request, among them where its part of the arrays begins."""
    calls = (DraftCallFields * len(drafts))()
    first_row = first_block = first_choice = 0
    for call, draft in zip(calls, drafts, strict=True):
        _fill(call, draft)
        call.first_row, call.first_block, call.first_choice = first_row, first_block, first_choice
        first_row, first_block = first_row + call.num_rows, first_block + call.num_blocks
        first_choice += call.num_choices
    return calls


def shapes_of(drafts: Sequence[NativeDraft]) -> dict[str, npt.NDArray[np.int32]]:
    """Return the blocks and the static trees of all requests by field name, one request after the other."""
    choices = [draft.choices for draft in drafts if draft.choices.num_nodes]
    return {
        "blocks": np.array([block for draft in drafts for block in draft.blocks], np.int32),
        "choice_parents": _joined(tree.parents for tree in choices),
        "choice_ranks": _joined(tree.tokens for tree in choices),
    }


def arrays_of(drafts: Sequence[NativeDraft]) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of all requests by field name, one request after the other, with empty ones for the answers."""
    count, features = len(drafts), np.concatenate([draft.features for draft in drafts])
    arrays: dict[str, npt.NDArray[Any]] = {
        **shapes_of(drafts),
        "tokens": np.array([token for draft in drafts for token in draft.tokens], np.int32),
        "features": np.ascontiguousarray(features, np.float32),
        "tree_sizes": np.empty(count, np.int32),
        "tree_tokens": np.empty((count, MAX_NODES), np.int32),
        "tree_parents": np.empty((count, MAX_NODES), np.int32),
    }
    if any(draft.draws for draft in drafts):
        arrays["q_sizes"] = np.zeros((count, MAX_NODES + 1), np.int32)
        arrays["q_tokens"] = np.empty((count, MAX_NODES + 1, MAX_CANDIDATES), np.int32)
        arrays["q_weights"] = np.empty((count, MAX_NODES + 1, MAX_CANDIDATES), np.float32)
    return arrays


def _fill(call: DraftCallFields, draft: NativeDraft) -> None:
    """Set the fields that do not depend on the other requests."""
    call.ranking = ranking_of(draft.sampling, draft.sharpness, draft.draws, draft.position)
    call.max_s, call.min_score = draft.max_s, draft.min_score
    call.position, call.root = draft.position, draft.tokens[-1]
    call.max_nodes, call.max_depth, call.width = draft.max_nodes, draft.max_depth, draft.width
    call.num_choices, call.num_rows, call.num_blocks = draft.choices.num_nodes, len(draft.tokens), len(draft.blocks)
    call.first_slot, call.gap_start, call.gap_stop = draft.first_slot, draft.gap.start, draft.gap.stop


def _joined(arrays: Iterable[IdArray]) -> npt.NDArray[np.int32]:
    """Return the int32 arrays joined; there may be none."""
    return np.concatenate([np.empty(0, np.int32), *arrays])
