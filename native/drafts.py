"""Drafts in C++, for the proposers that need only tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Sequence
from ctypes import c_int32
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from native.drafts_library import (
    PredictedOptions,
    PromptLookupOptions,
    SuffixOptions,
    TreeFields,
    drafts_library,
)
from native.failures import check, counted, made
from native.freeing import freed_with
from native.response_memory import NativeRecollection
from orchestrator.core.arrays import FloatArray
from orchestrator.core.tree import MAX_NODES, TokenTree

#: Most tokens that a call reads, which takes about a millisecond.
PIECE = 2048
#: `drafts::Level`.
LEVEL = np.dtype([(name, np.uint64) for name in ("keys", "tokens", "evidence")] + [("size", np.int64)])
#: `drafts::Shard`.
SHARD = np.dtype([("tokens", np.uint64), ("ends", np.uint64), ("num_ends", np.int64), ("num_tokens", np.int64)])
#: `drafts::Corpus`.
CORPUS = np.dtype([("shards", np.uint64), ("num_shards", np.int64), ("separator", np.int64)])
#: `drafts::Tables`.
TABLES = np.dtype([("levels", np.uint64), ("num_levels", np.int64), ("vocab_size", np.int64)])


class LikeliestFollowers(NamedTuple):
    """The likeliest token after each context of one length.

    keys: (c,) int64, the packed contexts, ascending. tokens, evidence: (c,) int32.
    """

    keys: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]
    evidence: npt.NDArray[np.int32]


class NativeTables:
    """Token statistics in the layout that GrowthBinding reads. levels: for contexts of 1, 2, … tokens."""

    def __init__(self, levels: Sequence[LikeliestFollowers], vocab_size: int) -> None:
        self._arrays = [tuple(map(np.ascontiguousarray, level)) for level in levels]
        addresses = [(*(array.ctypes.data for array in arrays), len(arrays[0])) for arrays in self._arrays]
        self._levels = np.array(addresses, LEVEL)
        self._tables = np.array([(self._levels.ctypes.data, len(levels), vocab_size)], TABLES)
        self.address = self._tables.ctypes.data


class NativeCorpus:
    """A preloaded corpus in the layout that native proposers read.

    shards: the (n,) int32 tokens and the (e,) uint32 ends of each, as in `orchestrator.drafting.corpus.Shard`.
    separator: the id that ends a document.
    """

    def __init__(self, shards: Sequence[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint32]]], separator: int) -> None:
        self._arrays = [tuple(map(np.ascontiguousarray, shard)) for shard in shards]  # mapped files are not copied
        fields = [(tokens.ctypes.data, ends.ctypes.data, len(ends), len(tokens)) for tokens, ends in self._arrays]
        self._shards = np.array(fields, SHARD)
        self._corpus = np.array([(self._shards.ctypes.data, len(shards), separator)], CORPUS)
        self.address = self._corpus.ctypes.data


class NativeEstimates:
    """The counts of accepted and tested candidates that all requests of a process share."""

    def __init__(self) -> None:
        self.library = library = drafts_library()
        self.handle = made(library.drafts_new_estimates(), "counts of accepted candidates")
        freed_with(self, library.drafts_free_estimates, self.handle)


class NativeProposer:
    """Drafts for one request.

    handle: for native code that drafts step by step (drafts.h). sources: what native code drafts from; kept as long as
    the proposer.
    """

    def __init__(self, library: ctypes.CDLL, handle: int | None, sources: Collection[object] = ()) -> None:
        self._library, self.handle = library, made(handle, "a proposer")
        self._sources = sources
        freed_with(self, library.drafts_free, self.handle)
        self._nodes = np.empty((3, MAX_NODES), np.int32)
        self._tree = TreeFields(*(row.ctypes.data for row in self._nodes))

    def next(self, read: Sequence[int], max_nodes: int, max_depth: int) -> tuple[TokenTree, list[int]]:
        """Return the tree after the text, and the name of each node's source; read: the new tokens.

        The calls keep the global lock: long texts are read in pieces.
        """
        while len(read) > PIECE:
            self._next(read[:PIECE], 0, 0)
            read = read[PIECE:]
        size = self._next(read, min(max_nodes, MAX_NODES), max_depth)
        tokens, parents, names = self._nodes[:, :size].copy()
        return TokenTree(tokens, parents), names.tolist()

    def _next(self, read: Sequence[int], max_nodes: int, max_depth: int) -> int:
        new = (c_int32 * len(read))(*read)
        size = self._library.drafts_next(self.handle, new, len(read), max_nodes, max_depth, self._tree)
        return counted(size, "a draft")


class PredictionBinding(NativeProposer):
    """Drafts for one request, whose output it follows through the client's prediction.

    prediction: token ids. Invariant: each call reads at most PIECE of them, as `next` does.
    """

    def __init__(
        self, library: ctypes.CDLL, handle: int | None, prediction: Sequence[int], sources: Collection[object] = ()
    ) -> None:
        super().__init__(library, handle, sources)
        self._read(library.drafts_read_prediction, prediction)

    def read_prompt(self, tokens: Sequence[int]) -> None:
        """Read a prompt, before the first tree."""
        self._read(self._library.drafts_read_prompt, tokens)

    def _read(self, function: Callable[..., bytes | None], tokens: Sequence[int]) -> None:
        """Let native code read tokens in pieces."""
        for start in range(0, len(tokens), PIECE):
            piece = tokens[start : start + PIECE]
            check(function(self.handle, (c_int32 * len(piece))(*piece), len(piece)), "reading")


class GrowthBinding(PredictionBinding):
    """Grows the trees of one request of `auto`."""

    def __init__(
        self,
        estimates: NativeEstimates,
        tables: NativeTables | None,
        corpus: NativeCorpus | None,
        memory: NativeRecollection | None,
        prediction: Sequence[int],
        is_chain: bool,
    ) -> None:
        library = estimates.library
        sources = *(each.address if each else None for each in (tables, corpus)), memory.handle if memory else None
        handle = library.drafts_new_growth(estimates.handle, *sources, is_chain)
        super().__init__(library, handle, prediction, (estimates, tables, corpus, memory))

    def size_by(self, seconds: FloatArray, others_tokens: float, rate_to_beat: float, temperature_range: int) -> None:
        """Set what the next trees are sized by, until it is set again.

        seconds: (n,) float64, of a pass in which the request has 1, 2, … rows. others_tokens: those that the other
        requests are expected to get from it. rate_to_beat: tokens per second without drafts. temperature_range: the
        request's, one of those that the counts distinguish.
        """
        size_by = self._library.drafts_size_by
        wrong = size_by(self.handle, seconds.ctypes.data, len(seconds), others_tokens, rate_to_beat, temperature_range)
        check(wrong, "sizing")


def native_predicted(options: PredictedOptions, prediction: Sequence[int]) -> PredictionBinding:
    """Return a `predicted` proposer for one request. prediction: token ids."""
    library = drafts_library()
    return PredictionBinding(library, library.drafts_new_predicted(options), prediction)


def native_prompt_lookup(options: PromptLookupOptions) -> NativeProposer:
    """Return a `prompt_lookup` proposer for one request."""
    library = drafts_library()
    return NativeProposer(library, library.drafts_new_prompt_lookup(options))


def native_suffix(
    options: SuffixOptions, memory: NativeRecollection | None = None, corpus: NativeCorpus | None = None
) -> NativeProposer:
    """Return a `suffix` proposer for one request."""
    library = drafts_library()
    handle = library.drafts_new_suffix(options, memory.handle if memory else None, corpus.address if corpus else None)
    return NativeProposer(library, handle, (memory, corpus))
