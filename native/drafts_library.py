"""The library of the native proposers: how it is built and called, and the structures that it takes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_double, c_int, c_int32, c_size_t, c_void_p
from functools import cache

from native.compiling import Unbuilt
from native.library import LIBRARY
from orchestrator.core.errors import ConfigError


class TreeFields(Structure):
    """The arrays that a tree is written to, as `drafts::Tree`."""

    _fields_ = [(name, c_void_p) for name in ("tokens", "parents", "names")]


class PredictedOptions(Structure):
    """`drafts::PredictedOptions`."""

    _fields_ = [(name, c_int32) for name in ("max_ngram", "draft_len")]


class PromptLookupOptions(Structure):
    """`drafts::PromptLookupOptions`."""

    _fields_ = [(name, c_int32) for name in ("max_ngram", "draft_len", "branches", "is_grown", "order", "clip")]


class SuffixOptions(Structure):
    """`drafts::SuffixOptions`."""

    _fields_ = [
        *((name, c_int32) for name in ("max_depth", "draft_len", "is_chain")),
        *((name, c_double) for name in ("factor", "min_prob")),
    ]


@cache
def drafts_library() -> ctypes.CDLL:
    """Return the library; raises ConfigError where it cannot be built.

    All calls hold Python's global lock, except those that may take long.
    """
    try:
        library = LIBRARY.load(ctypes.PyDLL)
    except Unbuilt as error:
        raise ConfigError(f"proposers need a C++ compiler: {error}") from None
    library.drafts_new_estimates.argtypes, library.drafts_new_estimates.restype = [], c_void_p
    library.drafts_new_memory.argtypes, library.drafts_new_memory.restype = [c_size_t], c_void_p
    library.drafts_new_recollection.argtypes = [c_void_p, c_char_p, c_size_t]
    library.drafts_new_recollection.restype = c_void_p
    library.drafts_remembered.argtypes = [c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_int]
    library.drafts_new_growth.argtypes = [c_void_p, c_void_p, c_void_p, c_void_p, c_int]
    library.drafts_new_predicted.argtypes = [POINTER(PredictedOptions)]
    library.drafts_new_prompt_lookup.argtypes = [POINTER(PromptLookupOptions)]
    library.drafts_new_suffix.argtypes = [POINTER(SuffixOptions), c_void_p, c_void_p]
    for new in (
        library.drafts_new_growth,
        library.drafts_new_predicted,
        library.drafts_new_prompt_lookup,
        library.drafts_new_suffix,
    ):
        new.restype = c_void_p
    library.drafts_next.argtypes = c_void_p, c_void_p, c_size_t, c_int, c_int, POINTER(TreeFields)
    library.drafts_size_by.argtypes = c_void_p, c_void_p, c_size_t, c_double, c_double, c_int
    library.drafts_size_by.restype = c_char_p
    for read in (library.drafts_read_prediction, library.drafts_read_prompt):
        read.argtypes, read.restype = [c_void_p, c_void_p, c_size_t], c_char_p
    # What may take milliseconds or more: the calls of a CDLL, unlike those of a PyDLL, let other threads run.
    releasing = ctypes.CDLL(library._name)
    frees = ("drafts_free", "drafts_free_estimates", "drafts_free_memory", "drafts_free_recollection")
    long = dict.fromkeys(frees, ([c_void_p], None)) | {"drafts_remember": ([c_void_p, c_void_p, c_size_t], c_char_p)}
    for name, (arguments, result) in long.items():
        call = getattr(releasing, name)
        call.argtypes, call.restype = arguments, result
        setattr(library, name, call)
    return library
