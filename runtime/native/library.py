"""The compiled forward pass, its structures and the types of its functions (ctypes)."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_void_p
from functools import cache
from pathlib import Path

from orchestrator.native.build import NativeLibrary

LIBRARY = NativeLibrary(
    "native",
    Path(__file__).resolve().parent,
    sources=(
        "model.cpp",
        "library.cpp",
        "trees.cpp",
        "ranking.cpp",
        "heads.cpp",
        "small_heads.cpp",
        "eagle.cpp",
        "heads_library.cpp",
    ),
    headers=(
        "kernels.h",
        "pool.h",
        "product.h",
        "model.h",
        "trees.h",
        "ranking.h",
        "heads.h",
        "small_heads.h",
        "eagle.h",
    ),
)


class Shape(Structure):
    """The sizes and constants of a decoder, as `native::Shape`."""

    _fields_ = [
        *((name, c_int32) for name in (
            "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "mlp_size", "vocab_size",
        )),
        ("norm_eps", c_float),
        ("score_scale", c_float),
    ]  # fmt: skip


class PassArrays(Structure):
    """One pass, as `native::Pass`; the arrays must outlive the call."""

    _fields_ = [
        *((name, c_int32) for name in (
            "num_rows", "num_logits", "num_context_slots", "num_extra_slots", "num_slots", "feature_width",
            "num_threads",
        )),
        *((name, c_void_p) for name in (
            "ids", "slots", "context_starts", "context_lens", "context_slots", "extra_starts", "extra_slots",
            "logit_rows", "cosines", "sines", "cache", "features", "logits", "inputs", "attention_inputs",
        )),
    ]  # fmt: skip


@cache
def load() -> ctypes.CDLL:
    """Return the library with its argument types; raises Unbuilt when it cannot be built or loaded."""
    library = LIBRARY.load()
    library.native_new.argtypes = [POINTER(Shape), c_int]
    library.native_new.restype = c_void_p
    library.native_delete.argtypes = [c_void_p]
    library.native_set_linear.argtypes = [c_void_p, c_int, c_char_p, c_void_p, c_int, c_int]
    library.native_set_vector.argtypes = [c_void_p, c_int, c_char_p, c_void_p, c_int]
    library.native_set_layer.argtypes = [c_void_p, c_int, c_int, c_int]
    library.native_forward.argtypes = [c_void_p, POINTER(PassArrays)]
    library.native_forward.restype = c_char_p
    return library
