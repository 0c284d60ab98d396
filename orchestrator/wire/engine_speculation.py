"""What crosses to and from an engine that drafts by itself, as flat tensors (docs/protocol.md, Engines that draft)."""

from __future__ import annotations

import numpy as np

from orchestrator.core.errors import EngineError
from orchestrator.core.types import EngineSpeculation, EngineSpeculationResult
from orchestrator.wire.tensors import Incoming, Tensors, ids, pack_ids, pack_text, runs, scalar, text

NUM_SIZES = 3


def pack_engine_speculation(inside: EngineSpeculation | None) -> Tensors:
    """Pack what is asked; what is left to the engine is omitted."""
    if inside is None:
        return {}
    return (
        {"inside_length": np.array([inside.length], np.int32)}
        | pack_ids("inside_sizes", inside.sizes)
        | pack_ids("inside_choice_lengths", [len(path) for path in inside.choices])
        | pack_ids("inside_choice_ranks", [rank for path in inside.choices for rank in path])
    )


def unpack_engine_speculation(tensors: Incoming) -> EngineSpeculation | None:
    """Unpack what is asked; raises EngineError when a tensor breaks a law."""
    if "inside_length" not in tensors:
        return None
    length, sizes = scalar(tensors, "inside_length"), tuple(ids(tensors, "inside_sizes").tolist())
    if length < 1 or len(sizes) not in (0, NUM_SIZES):
        raise EngineError(f"inside_length must be 1 or more, inside_sizes {NUM_SIZES} or none; got {length}, {sizes}")
    lengths = ids(tensors, "inside_choice_lengths").tolist()
    paths = runs(ids(tensors, "inside_choice_ranks").tolist(), lengths, "inside_choice_ranks")
    return EngineSpeculation(length, tuple(map(tuple, paths)), sizes)


def pack_engine_speculation_result(burst: EngineSpeculationResult | None) -> Tensors:
    """Pack what an engine did by itself; one that drafts not packs to nothing."""
    if burst is None:
        return {}
    return (
        pack_text("drafted_by", burst.method)
        | pack_ids("extra_ids", burst.extra)
        | pack_ids("pass_lengths", burst.lengths)
        | {"num_drafted": np.array([burst.num_drafted], np.int32)}
    )


def unpack_engine_speculation_result(tensors: Incoming) -> EngineSpeculationResult | None:
    """Unpack what an engine did by itself; raises EngineError when its passes do not add up to its tokens."""
    if "pass_lengths" not in tensors:
        return None
    extra, lengths = tuple(ids(tensors, "extra_ids").tolist()), tuple(ids(tensors, "pass_lengths").tolist())
    if min(lengths, default=0) < 1 or sum(lengths) != len(extra) + 1:
        raise EngineError(f"target says that passes of {lengths} tokens brought {len(extra) + 1}")
    return EngineSpeculationResult(text(tensors, "drafted_by"), extra, lengths, scalar(tensors, "num_drafted", 0))
