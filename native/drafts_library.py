"""The library of the native proposers: how it is built and called, and the structures that it takes."""

from __future__ import annotations

import ctypes
import logging
from ctypes import POINTER, Structure, c_char_p, c_double, c_int, c_int32, c_size_t, c_void_p
from functools import cache

from native.library import LIBRARY
from orchestrator.core.cost_model import CostModel, Curve

log = logging.getLogger(__name__)


class CostFields(Structure):
    """The costs that determine the size of a tree, as `drafts::Costs`."""

    _fields_ = [
        ("seconds", c_void_p),
        ("row_s", c_void_p),
        ("others_tokens", c_double),
        ("rate_to_beat", c_double),
    ]

    @classmethod
    def of(cls, costs: CostModel) -> CostFields:
        """Return the fields of a cost model, whose arrays must outlive them."""
        arrays = costs.seconds.ctypes.data, costs.row_s.ctypes.data
        return cls(*arrays, costs.others_tokens, costs.rate_to_beat)


class CurveFields(Structure):
    """The costs of passes by their rows, as `drafts::Curve`."""

    _fields_ = [("rows", c_void_p), ("seconds", c_void_p), ("row_s", c_double), ("num_points", c_int32)]

    @classmethod
    def of(cls, curve: Curve) -> CurveFields:
        """Return the fields of a curve, whose arrays must outlive them."""
        return cls(curve.rows.ctypes.data, curve.seconds.ctypes.data, curve.row_s, len(curve.rows))


class TreeFields(Structure):
    """The arrays that a tree is written to, as `drafts::Tree`."""

    _fields_ = [(name, c_void_p) for name in ("tokens", "parents", "names", "probabilities")]


class SharedPassFields(Structure):
    """A pass whose trees grow together, as `drafts::SharedPass`."""

    _fields_ = [
        ("curve", CurveFields),
        ("contexts_s", c_double),
        ("tokens", c_double),
        ("num_requests", c_int32),
        ("num_rows", c_int32),
    ]


class JointTreeFields(Structure):
    """One request's part in such a pass, as `drafts::JointTree`."""

    _fields_ = [
        ("growth", c_void_p),
        ("committed", c_void_p),
        ("num_committed", c_size_t),
        ("context_row_s", c_double),
        ("tree", TreeFields),
        *((name, c_int32) for name in ("max_nodes", "max_depth", "num_nodes")),
    ]


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
    """Return the library with the argument types of its proposers; raises Unbuilt where it cannot be built.

    All calls hold Python's global lock, except those that may take long.
    """
    library = LIBRARY.load(ctypes.PyDLL)
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
    library.drafts_grow.argtypes = c_void_p, c_int, c_int, c_int, POINTER(CostFields), POINTER(TreeFields)
    library.drafts_grow_jointly.argtypes = [POINTER(JointTreeFields), c_size_t, POINTER(SharedPassFields)]
    library.drafts_grow_jointly.restype = c_char_p
    for read in (
        library.drafts_read_prediction,
        library.drafts_read_prompt,
        library.drafts_read,
        library.drafts_learn,
    ):
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
