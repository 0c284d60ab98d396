"""Drafts in C++, for the proposers that need only tokens; the Python proposers are reference and fallback."""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_double, c_int, c_int32, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from orchestrator.core.surfaces import Surface
from orchestrator.core.tree import MAX_NODES, TokenTree
from orchestrator.core.types import FloatArray
from orchestrator.native.compiling import NativeLibrary, Unbuilt
from orchestrator.native.failures import check, counted, made

log = logging.getLogger(__name__)

LIBRARY = NativeLibrary(
    "drafts",
    Path(__file__).resolve().parent,
    sources=("drafts.cpp",),
    headers=(
        "automaton.h",
        "corpus.h",
        "drafts.h",
        "estimates.h",
        "growth.h",
        "guarded.h",
        "prompt_lookup.h",
        "suffix.h",
    ),
)
#: Most tokens that a call reads, which takes about a millisecond.
PIECE = 2048
#: `drafts::Level`.
LEVEL = np.dtype([(name, np.uint64) for name in ("keys", "tokens", "evidence")] + [("size", np.int64)])
#: `drafts::Shard`.
SHARD = np.dtype([("tokens", np.uint64), ("ends", np.uint64), ("num_ends", np.int64)])
#: `drafts::Corpus`.
CORPUS = np.dtype([("shards", np.uint64), ("num_shards", np.int64)])
#: `drafts::Tables`.
TABLES = np.dtype([("levels", np.uint64), ("num_levels", np.int64), ("vocab_size", np.int64)])


class CostFields(Structure):
    """The costs that determine the size of a tree, as `drafts::Costs`. node_s: time to draft a node."""

    _fields_ = [
        ("seconds", c_void_p),
        ("row_s", c_void_p),
        *((name, c_double) for name in ("others_tokens", "rate", "node_s")),
    ]

    @classmethod
    def of(cls, surface: Surface, node_s: float = 0.0) -> CostFields:
        """Return the fields of a surface, whose arrays must outlive them."""
        arrays = surface.seconds.ctypes.data, surface.row_s.ctypes.data
        return cls(*arrays, surface.others_tokens, surface.rate, node_s)


class TreeFields(Structure):
    """The arrays that a tree is written to, as `drafts::Tree`."""

    _fields_ = [(name, c_void_p) for name in ("tokens", "parents", "names", "chances")]


class PromptLookupOptions(Structure):
    """`drafts::PromptLookupOptions`."""

    _fields_ = [(name, c_int32) for name in ("max_ngram", "draft_len", "branches", "is_grown", "order", "clip")]


class SuffixOptions(Structure):
    """`drafts::SuffixOptions`."""

    _fields_ = [
        *((name, c_int32) for name in ("max_depth", "draft_len", "is_chain")),
        *((name, c_double) for name in ("factor", "min_prob")),
    ]


class LikeliestFollowers(NamedTuple):
    """The likeliest token after each context of one length.

    keys: (c,) int64, the packed contexts, ascending. tokens, evidence: (c,) int32.
    """

    keys: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]
    evidence: npt.NDArray[np.int32]


class CompiledTables:
    """Token statistics in the layout that CompiledGrowth reads. levels: for contexts of 1, 2, … tokens."""

    def __init__(self, levels: Sequence[LikeliestFollowers], vocab_size: int) -> None:
        self._arrays = [tuple(map(np.ascontiguousarray, level)) for level in levels]
        addresses = [(*(array.ctypes.data for array in arrays), len(arrays[0])) for arrays in self._arrays]
        self._levels = np.array(addresses, LEVEL)
        self._tables = np.array([(self._levels.ctypes.data, len(levels), vocab_size)], TABLES)
        self.address = self._tables.ctypes.data


class CompiledCorpus:
    """A preloaded corpus in the layout that CompiledGrowth reads.

    shards: the (n,) int32 tokens and the (e,) uint32 ends of each, as in `orchestrator.proposers.corpus.Shard`.
    """

    def __init__(self, shards: Sequence[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint32]]]) -> None:
        self._arrays = [tuple(map(np.ascontiguousarray, shard)) for shard in shards]  # mapped files are not copied
        self._shards = np.array(
            [(tokens.ctypes.data, ends.ctypes.data, len(ends)) for tokens, ends in self._arrays], SHARD
        )
        self._corpus = np.array([(self._shards.ctypes.data, len(shards))], CORPUS)
        self.address = self._corpus.ctypes.data


class CompiledEstimates:
    """The counts of accepted and tested candidates that all requests of a process share."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.handle = made(library.drafts_new_estimates(), "counts of accepted candidates")
        weakref.finalize(self, library.drafts_free_estimates, self.handle)


class CompiledProposer:
    """Drafts for one request.

    handle, next_address: for native code that drafts step by step (drafts.h).
    Invariant: every tree equals that of the Python reference, names included.
    """

    def __init__(self, library: ctypes.CDLL, handle: int | None) -> None:
        self._library, self.handle = library, made(handle, "a proposer")
        self.next_address: int = ctypes.cast(library.drafts_next, c_void_p).value or 0
        weakref.finalize(self, library.drafts_free, self.handle)
        self._nodes, self._chances = np.empty((3, MAX_NODES), np.int32), np.empty(MAX_NODES)
        self._tree = TreeFields(*(row.ctypes.data for row in (*self._nodes, self._chances)))

    def next(self, read: Sequence[int], max_nodes: int, max_depth: int) -> TokenTree:
        """Return the tree after the text; read: the new tokens. Not for a growth, whose trees are sized by costs.

        The calls keep Python's global lock, so a long text is read in pieces.
        """
        while len(read) > PIECE:
            self._next(read[:PIECE], 0, 0)
            read = read[PIECE:]
        size = self._next(read, min(max_nodes, MAX_NODES), max_depth)
        return TokenTree(*self._nodes[:2, :size].copy())

    def _next(self, read: Sequence[int], max_nodes: int, max_depth: int) -> int:
        new = (c_int32 * len(read))(*read)
        size = self._library.drafts_next(self.handle, new, len(read), max_nodes, max_depth, None, self._tree)
        return counted(size, "a draft")


class CompiledGrowth(CompiledProposer):
    """Grows the trees of one request of `auto`."""

    def __init__(
        self,
        estimates: CompiledEstimates,
        tables: CompiledTables | None,
        corpus: CompiledCorpus | None,
        prediction: Sequence[int],
        is_chain: bool,
    ) -> None:
        self._kept = estimates, tables, corpus
        ids, library = np.array(prediction, np.int32), estimates.library
        sources = (each.address if each else None for each in (tables, corpus))
        handle = library.drafts_new_growth(estimates.handle, *sources, ids.ctypes.data, len(ids), is_chain)
        super().__init__(library, handle)
        self._has_begun = False

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
        """Return the tree, each node's sources as bits, and each node's chance.

        The bits are 1 for the prediction, 2 for the text, 4 for the corpus, 8 for the token statistics.
        read: the new tokens. temperature_range: the request's, one of those that the counts distinguish. place: index
        in the prediction, −1 where it does not fit. agreement: tokens before it that fit.
        """
        while len(read) > PIECE and not self._has_begun:  # in pieces, as in `next`
            piece, read = (c_int32 * PIECE)(*read[:PIECE]), read[PIECE:]
            check(self._library.drafts_read_beginning(self.handle, piece, PIECE), "reading")
        self._has_begun = True
        new = (c_int32 * len(read))(*read)
        limits = temperature_range, place, agreement, min(max_nodes, MAX_NODES), max_depth
        fields = CostFields.of(costs, node_s)
        size = counted(self._library.drafts_grow(self.handle, new, len(read), *limits, fields, self._tree), "a draft")
        tokens, parents, names = self._nodes[:, :size].copy()
        return TokenTree(tokens, parents), names.tolist(), self._chances[:size].copy()

    def learn(self, tokens: Sequence[int]) -> None:
        """Compare the candidates of the last tree with the text that followed."""
        check(self._library.drafts_learn(self.handle, (c_int32 * len(tokens))(*tokens), len(tokens)), "learning")


@cache
def _library() -> ctypes.CDLL | None:
    """Return the library; None, with a warning, where it cannot be built. Calls keep Python's global lock."""
    try:
        library = LIBRARY.load(ctypes.PyDLL)
    except Unbuilt as error:
        log.warning("drafts are not compiled, and therefore slower: %s", error)
        return None
    library.drafts_new_estimates.argtypes, library.drafts_new_estimates.restype = [], c_void_p
    library.drafts_new_growth.argtypes = [c_void_p, c_void_p, c_void_p, c_void_p, c_size_t, c_int]
    library.drafts_new_prompt_lookup.argtypes = [POINTER(PromptLookupOptions)]
    library.drafts_new_suffix.argtypes = [POINTER(SuffixOptions)]
    for new in (library.drafts_new_growth, library.drafts_new_prompt_lookup, library.drafts_new_suffix):
        new.restype = c_void_p
    written = POINTER(CostFields), POINTER(TreeFields)
    library.drafts_next.argtypes = c_void_p, c_void_p, c_size_t, c_int, c_int, *written
    library.drafts_grow.argtypes = c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, c_int, c_int, *written
    for read in (library.drafts_read_beginning, library.drafts_learn):
        read.argtypes, read.restype = [c_void_p, c_void_p, c_size_t], c_char_p
    for free in (library.drafts_free, library.drafts_free_estimates):
        free.argtypes, free.restype = [c_void_p], None
    return library


def compiled_estimates() -> CompiledEstimates | None:
    """Return new counts; None where the library cannot be built."""
    library = _library()
    return CompiledEstimates(library) if library else None


def compiled_prompt_lookup(options: PromptLookupOptions) -> CompiledProposer | None:
    """Return a `prompt_lookup` proposer for one request; None where the library cannot be built."""
    library = _library()
    return CompiledProposer(library, library.drafts_new_prompt_lookup(options)) if library else None


def compiled_suffix(options: SuffixOptions) -> CompiledProposer | None:
    """Return a `suffix` proposer for one request's text; None where the library cannot be built."""
    library = _library()
    return CompiledProposer(library, library.drafts_new_suffix(options)) if library else None
