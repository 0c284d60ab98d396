"""The growth of `auto` in C++: the trees of `orchestrator/proposers/growth.py`, which is reference and fallback."""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Sequence
from ctypes import c_double, c_int, c_int32, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from orchestrator.core.step_costs import Surface
from orchestrator.core.tree import MAX_NODES, TokenTree
from orchestrator.core.types import FloatArray
from orchestrator.native.build import NativeLibrary, Unbuilt

log = logging.getLogger(__name__)

LIBRARY = NativeLibrary(
    "drafts",
    Path(__file__).resolve().parent,
    sources=("drafts.cpp",),
    headers=("automaton.h", "drafts.h", "estimates.h", "growth.h"),
)
#: `drafts::Level`.
LEVEL = np.dtype([(name, np.uint64) for name in ("keys", "tokens", "evidence")] + [("size", np.int64)])
#: `drafts::Tables`.
TABLES = np.dtype([("levels", np.uint64), ("num_levels", np.int64), ("vocab_size", np.int64)])


class LikeliestFollowers(NamedTuple):
    """The likeliest token after each context of one length.

    keys: (c,) int64, the packed contexts, ascending. tokens, evidence: (c,) int32.
    """

    keys: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]
    evidence: npt.NDArray[np.int32]


class CompiledTables:
    """Token statistics for the compiled growth. levels: of contexts of 1, 2, … tokens."""

    def __init__(self, levels: Sequence[LikeliestFollowers], vocab_size: int) -> None:
        self._arrays = [tuple(map(np.ascontiguousarray, level)) for level in levels]
        addresses = [(*(array.ctypes.data for array in arrays), len(arrays[0])) for arrays in self._arrays]
        self._levels = np.array(addresses, LEVEL)
        self._tables = np.array([(self._levels.ctypes.data, len(levels), vocab_size)], TABLES)
        self.address = self._tables.ctypes.data


class CompiledEstimates:
    """The counts of candidates of one deployment."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.handle = library.drafts_new_estimates()
        weakref.finalize(self, library.drafts_free_estimates, self.handle)


class CompiledGrowth:
    """Grows the trees of one request.

    handle, next_address: for native code that grows them step by step (drafts.h).
    Invariant: a tree is that of the reference over the same sources, names included.
    """

    def __init__(
        self, estimates: CompiledEstimates, tables: CompiledTables | None, prediction: Sequence[int], is_chain: bool
    ) -> None:
        self._library, self._kept = estimates.library, (estimates, tables)
        ids = np.array(prediction, np.int32)
        address = tables.address if tables else None
        self.handle = self._library.drafts_new(estimates.handle, address, ids.ctypes.data, len(ids), is_chain)
        self.next_address: int = ctypes.cast(self._library.drafts_next, c_void_p).value or 0
        weakref.finalize(self, self._library.drafts_free, self.handle)
        self._tree = np.empty((3, MAX_NODES), np.int32)
        self._chances = np.empty(MAX_NODES)
        self._outputs = [row.ctypes.data for row in (*self._tree, self._chances)]

    def grow(
        self,
        read: Sequence[int],
        temperature_range: int,
        place: int,
        agreement: int,
        max_nodes: int,
        max_depth: int,
        costs: Surface,
        node_s: float,
    ) -> tuple[TokenTree, list[int], FloatArray]:
        """Return the tree, the sources of each node as bits (1 prediction, 2 text, 4 token statistics), its chance.

        read: the tokens that are new. temperature_range: of the request, as the counts tell it apart.
        place: in the prediction, −1 where it does not fit. agreement: before the place.
        """
        new = (c_int32 * len(read))(*read)
        limits = temperature_range, place, agreement, min(max_nodes, MAX_NODES), max_depth
        surface = costs.seconds.ctypes.data, costs.row_s.ctypes.data, costs.others_tokens, costs.rate, node_s
        size = self._library.drafts_grow(self.handle, new, len(read), *limits, *surface, *self._outputs)
        tokens, parents, names = self._tree[:, :size].copy()
        return TokenTree(tokens, parents), names.tolist(), self._chances[:size].copy()

    def learn(self, tokens: Sequence[int]) -> None:
        """Compare the candidates of the last tree with the text that came."""
        self._library.drafts_learn(self.handle, (c_int32 * len(tokens))(*tokens), len(tokens))


@cache
def _library() -> ctypes.CDLL | None:
    """Return the library; None, with a warning, where it cannot be built. Python keeps its lock in calls."""
    try:
        library = LIBRARY.load(ctypes.PyDLL)
    except Unbuilt as error:
        log.warning("drafts of auto are not compiled, and slower for it: %s", error)
        return None
    library.drafts_new_estimates.argtypes, library.drafts_new_estimates.restype = [], c_void_p
    library.drafts_new.argtypes = [c_void_p, c_void_p, c_void_p, c_size_t, c_int]
    library.drafts_new.restype = c_void_p
    limits_and_costs = (c_int, c_int, c_int, c_int, c_int, c_void_p, c_void_p, c_double, c_double, c_double)
    tree = (c_void_p, c_void_p, c_void_p, c_void_p)
    library.drafts_grow.argtypes = (c_void_p, c_void_p, c_size_t, *limits_and_costs, *tree)
    library.drafts_grow.restype = c_int
    library.drafts_learn.argtypes, library.drafts_learn.restype = [c_void_p, c_void_p, c_size_t], None
    for free in (library.drafts_free, library.drafts_free_estimates):
        free.argtypes, free.restype = [c_void_p], None
    return library


def compiled_estimates() -> CompiledEstimates | None:
    """Return new counts; None where the library cannot be built."""
    library = _library()
    return CompiledEstimates(library) if library else None
