"""Drafting heads in native code on the CPU: one call drafts the trees of several requests.

Invariant: a tree depends only on the head and its own request, bit for bit, whatever shares the call.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence
from ctypes import c_double
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from native.failures import check
from native.head_fields import DraftingFields
from native.threads import ThreadChoice, available_threads
from orchestrator.core.tree import MAX_NODES, TokenTree
from orchestrator.core.types import Distribution, DraftResponse
from runtime.engine.kv.cache import KVCache
from runtime.models.native.draft_calls import NativeDraft, arrays_of, calls_of
from runtime.models.native.drafters import UNLIMITED, NativeDrafter
from runtime.models.native.head_weights import HeadWeights, load_heads
from runtime.models.quantized import Quantized

#: Maximum threads of a draft.
MAX_THREADS = 4


class NativeHead:
    """A head for which `unsupported_head` returns ""; its weights are copied.

    num_threads: threads of the next call, at most MAX_THREADS; None = chosen for each call by measurement.
    call_s: seconds of the last call.
    """

    def __init__(self, head: nn.Module, quantized: Quantized | None = None) -> None:
        """quantized: the quantised form of matrices; the inputs of their products are rounded to 8 bits."""
        self.num_threads: int | None = None
        self._choice = ThreadChoice(min(available_threads(), MAX_THREADS))
        self.call_s = 0.0
        self._library = load_heads()
        self._selection_s = c_double()
        self._handle, self._rotations = HeadWeights(self._library, MAX_THREADS, quantized or {}).copy(head)

    def __del__(self) -> None:
        if handle := getattr(self, "_handle", None):
            self._library.native_head_delete(handle)

    @property
    def selection_s(self) -> float:
        """Seconds that the last call spent on ranking tokens and choosing nodes."""
        return self._selection_s.value

    def draft(self, drafts: Sequence[NativeDraft], cache: KVCache | None = None) -> list[DraftResponse]:
        """Return the draft of each request. cache: the head's, if it has one; its features hold the head's outputs."""
        calls, arrays = calls_of(drafts), arrays_of(drafts)
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
        check(wrong, "the head")
        if self.num_threads is None:
            self._choice.observe(num_rows, num_threads, self.call_s)
        return [_drafted(arrays, place, draft.draws) for place, draft in enumerate(drafts)]

    def burst_drafter(
        self, drafts: Sequence[NativeDraft], cache: KVCache | None = None, max_positions: int = UNLIMITED
    ) -> NativeDrafter:
        """Return what native code needs to call the head in a burst.

        cache, max_positions: the head's, if it keeps rows.
        """
        if cache is not None and self._rotations is not None:
            # Only the last level of a draft can have positions beyond the draft's blocks.
            self._rotations.reach(max(len(each.blocks) * cache.block_tokens + each.max_depth for each in drafts))
        num_threads = self.num_threads or self._choice.choose(len(drafts))
        note_time = None if self.num_threads else self._choice.observe
        return NativeDrafter(
            drafts, cache, max_positions, num_threads, note_time, head=self._handle, rotations=self._rotations
        )

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
