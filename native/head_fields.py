"""The structures of a draft call, as native code reads them (native/heads/heads.h)."""

from __future__ import annotations

from ctypes import Structure, c_double, c_int32, c_int64, c_void_p

from native.ranking import RankingFields


class DraftCallFields(Structure):
    """One request, as `native::DraftCall`."""

    _fields_ = [
        ("ranking", RankingFields),
        ("max_s", c_double),
        ("min_score", c_double),
        ("position", c_int64),
        *((name, c_int32) for name in (
            "root", "max_nodes", "max_depth", "width", "first_choice", "num_choices", "first_row", "num_rows",
            "first_block", "num_blocks", "first_slot", "gap_start", "gap_stop",
        )),
    ]  # fmt: skip


class DraftingFields(Structure):
    """All requests of a call, as `native::Drafting`; the arrays must outlive the call."""

    _fields_ = [
        *((name, c_int32) for name in (
            "num_calls", "num_threads", "num_rows", "num_choices", "num_blocks", "max_tree",
        )),
        *((name, c_void_p) for name in (
            "calls", "tokens", "choice_parents", "choice_ranks", "blocks", "features", "cosines", "sines", "cache",
            "states",
        )),
        *((name, c_int32) for name in ("num_positions", "num_slots", "block_tokens")),
        *((name, c_void_p) for name in (
            "tree_sizes", "tree_tokens", "tree_parents", "q_sizes", "q_tokens", "q_weights", "selection_s",
        )),
    ]  # fmt: skip
