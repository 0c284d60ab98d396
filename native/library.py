"""The compiled forward pass: its structures, and the types of its functions (ctypes)."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_size_t, c_void_p
from functools import cache
from pathlib import Path

from native.compiling import NativeLibrary

FOLDER = Path(__file__).resolve().parent
#: Everything that is compiled: C++ calls C++ across the folders.
LIBRARY = NativeLibrary(
    "native",
    FOLDER,
    sources=tuple(sorted(str(file.relative_to(FOLDER)) for file in FOLDER.rglob("*.cpp"))),
    headers=tuple(sorted(str(file.relative_to(FOLDER)) for file in FOLDER.rglob("*.h"))),
)


class Shape(Structure):
    """The sizes and constants of a decoder, as `native::Shape`."""

    _fields_ = [
        *((name, c_int32) for name in (
            "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "mlp_size", "vocab_size",
        )),
        *((name, c_float) for name in (
            "norm_eps", "score_scale", "score_softcap", "logit_softcap", "embedding_scale",
        )),
        ("is_gelu", c_int32),
        ("rotary_size", c_int32),
        ("rounds_inputs", c_int32),
    ]  # fmt: skip


class PassArrays(Structure):
    """A pass over segments, as `native::SegmentPass`; the arrays must outlive the call.

    segments: (num_segments, 4) int32: first, last, number of nodes, number of blocks.
    """

    _fields_ = [
        *((name, c_int32) for name in (
            "num_segments", "num_rows", "num_logits", "num_blocks", "num_nodes", "block_tokens", "num_slots",
            "feature_width", "num_threads",
        )),
        *((name, c_void_p) for name in ("segments", "ids", "blocks", "parents", "cache", "features", "logits")),
    ]  # fmt: skip


@cache
def load() -> ctypes.CDLL:
    """Return the library with its argument types; raises Unbuilt when it cannot be built or loaded."""
    library = LIBRARY.load()
    library.native_new.argtypes = [POINTER(Shape), c_int]
    library.native_new.restype = c_void_p
    library.native_delete.argtypes = [c_void_p]
    library.native_set_linear.argtypes = [c_void_p, c_int, c_char_p, c_void_p, c_int, c_int]
    library.native_set_quantized.argtypes = [c_void_p, c_int, c_char_p, c_int, c_void_p, c_int, c_int]
    library.native_set_vector.argtypes = [c_void_p, c_int, c_char_p, c_void_p, c_int]
    library.native_set_layer.argtypes = [c_void_p, c_int, c_int, c_int]
    library.native_move.argtypes = [c_void_p, *(4 * [c_int]), c_void_p, c_void_p, c_int]
    library.native_add_rotation.argtypes = [c_void_p, c_void_p, c_int, c_float]
    for name in (
        "set_linear", "set_quantized", "set_vector", "move", "add_rotation", "forward_segments", "draft_chains",
        "decode",
    ):  # fmt: skip
        getattr(library, f"native_{name}").restype = c_char_p  # what is wrong
    library.native_set_rotation.argtypes = [c_void_p, c_int, c_int]
    library.native_advise.argtypes, library.native_advise.restype = [c_void_p, c_size_t], None
    library.native_forward_segments.argtypes = [c_void_p, POINTER(PassArrays)]
    library.native_draft_chains.argtypes = [c_void_p, POINTER(PassArrays), c_void_p]
    library.native_decode.argtypes = [c_void_p, POINTER(PassArrays), c_void_p]
    return library
