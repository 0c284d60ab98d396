"""Drafting heads in native code on the CPU: one call drafts the trees of several requests.

Invariant: a tree depends on the head and on its own request alone, bit for bit, whatever shares the call.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from ctypes import Array, c_double
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from orchestrator.core.errors import EngineError
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import MAX_NODES, TokenTree
from orchestrator.core.types import Distribution, DraftResponse, Features, IdArray
from orchestrator.sampling.sampled_drafts import MAX_CANDIDATES
from runtime.kv.cache import KVCache
from runtime.native.head_fields import DraftCallFields, DraftingFields
from runtime.native.head_weights import HeadWeights, load_heads
from runtime.native.ranking import ranking_of
from runtime.native.threads import ThreadChoice, available_threads

#: Threads that a draft can use.
MAX_THREADS = 4


@dataclass(frozen=True, eq=False)
class NativeDraft:
    """What a head needs to draft for one request.

    position: of the tokens below the root. choices: the shape of a static tree; bare for a dynamic one of `width`.
    tokens: of the context rows to read, the root last. features: the target's, a row for each of them.
    max_s: no level is begun that would end later, in seconds from now. min_score: the least log-confidence of a path.
    draws: the nodes are sampled from q. sharpness: of the confidences by which the tree grows.
    A head with a cache also has its blocks, the slot of the first row, and the slots that hold no row.
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


class NativeHead:
    """A head whose `unsupported_head` is empty; its weights are copied. Of a head in bfloat16 the products are in it.

    num_threads: of the next call, at most MAX_THREADS; None = chosen for each call by measurement. call_s: seconds of
    the last call.
    """

    def __init__(self, head: nn.Module) -> None:
        self.num_threads: int | None = None
        self._choice = ThreadChoice(min(available_threads(), MAX_THREADS))
        self.call_s = 0.0
        self._library = load_heads()
        self._selection_s = c_double()
        self._handle, self._rotations = HeadWeights(self._library, MAX_THREADS).copy(head)

    def __del__(self) -> None:
        if handle := getattr(self, "_handle", None):
            self._library.native_head_delete(handle)

    @property
    def selection_s(self) -> float:
        """Seconds of the last call that went into ranking tokens and choosing nodes."""
        return self._selection_s.value

    def draft(self, drafts: Sequence[NativeDraft], cache: KVCache | None = None) -> list[DraftResponse]:
        """Return the draft of each request. cache: of a head that has one; its features hold the head's outputs."""
        calls, arrays = _calls_of(drafts), _arrays_of(drafts)
        num_rows = len(arrays["tokens"])
        num_threads = self.num_threads or self._choice.choose(num_rows)
        fields = DraftingFields(
            num_calls=len(drafts),
            num_threads=num_threads,
            num_rows=num_rows,
            num_choices=len(arrays["choice_ranks"]),
            num_blocks=len(arrays["blocks"]),
            max_tree=MAX_NODES,
            calls=ctypes.addressof(calls),
            selection_s=ctypes.addressof(self._selection_s),
            **{name: array.ctypes.data for name, array in arrays.items()},
        )
        if cache is not None:
            self._describe_cache(fields, cache, max(draft.position + draft.max_depth for draft in drafts))
        began_s = time.perf_counter()
        wrong = self._library.native_head_draft(self._handle, ctypes.byref(fields))
        self.call_s = time.perf_counter() - began_s
        if wrong:
            raise EngineError(f"the native head refused its arguments: {wrong.decode()}")
        if self.num_threads is None:
            self._choice.observe(num_rows, num_threads, self.call_s)
        return [_drafted(arrays, place, draft.draws) for place, draft in enumerate(drafts)]

    def _describe_cache(self, fields: DraftingFields, cache: KVCache, num_positions: int) -> None:
        assert self._rotations is not None
        self._rotations.reach(num_positions)
        fields.cosines, fields.sines = (table.ctypes.data for table in (self._rotations.cosines, self._rotations.sines))
        fields.num_positions = len(self._rotations.cosines)
        fields.cache, fields.states = cache.kv.data_ptr(), cache.features.data_ptr()
        fields.num_slots, fields.block_tokens = cache.kv.shape[3], cache.block_tokens


def _drafted(arrays: Mapping[str, npt.NDArray[Any]], place: int, draws: bool) -> DraftResponse:
    """Return the draft of the request at this place of the arrays."""
    size = int(arrays["tree_sizes"][place])
    parents = arrays["tree_parents"][place, :size].copy()
    tree = TokenTree(arrays["tree_tokens"][place, :size].copy(), parents)
    if not draws:
        return DraftResponse(tree)
    q = {}
    for parent in set(parents.tolist()):
        count = int(arrays["q_sizes"][place, parent])
        tokens, weights = (arrays[name][place, parent, :count] for name in ("q_tokens", "q_weights"))
        ascending = np.argsort(tokens)
        q[parent] = Distribution(tokens[ascending], weights[ascending])
    return DraftResponse(tree, tuple(q[parent] for parent in parents.tolist()))


def _calls_of(drafts: Sequence[NativeDraft]) -> Array[DraftCallFields]:
    """Return what the library reads of each request, and where its part of the arrays begins."""
    calls = (DraftCallFields * len(drafts))()
    first_row = first_block = first_choice = 0
    for call, draft in zip(calls, drafts, strict=True):
        _fill(call, draft)
        call.first_row, call.first_block, call.first_choice = first_row, first_block, first_choice
        first_row, first_block = first_row + call.num_rows, first_block + call.num_blocks
        first_choice += call.num_choices
    return calls


def _arrays_of(drafts: Sequence[NativeDraft]) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of all requests by their fields, one request behind the other; those of answers are empty."""
    choices, count = [draft.choices for draft in drafts if draft.choices.num_nodes], len(drafts)
    features = np.concatenate([draft.features for draft in drafts])
    arrays: dict[str, npt.NDArray[Any]] = {
        "tokens": np.array([token for draft in drafts for token in draft.tokens], np.int32),
        "blocks": np.array([block for draft in drafts for block in draft.blocks], np.int32),
        "choice_parents": _joined(tree.parents for tree in choices),
        "choice_ranks": _joined(tree.tokens for tree in choices),
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
    """Return int32 arrays one after the other; there may be none."""
    return np.concatenate([np.empty(0, np.int32), *arrays])
