"""Options and results of an engine that drafts by itself, as flat tensors (docs/wire.md, Engines that draft)."""

from __future__ import annotations

from orchestrator.core.errors import EngineError
from orchestrator.core.messages.tensors import (
    Incoming,
    Tensors,
    ids,
    pack_ids,
    pack_scalars,
    pack_text,
    scalar,
    split,
    text,
)
from orchestrator.core.types import EngineSpeculation, EngineSpeculationResult

NUM_SIZES = 3


def pack_engine_speculation(options: EngineSpeculation | None) -> Tensors:
    """Pack the options of an engine's own speculation; those left to the engine are omitted."""
    if options is None:
        return {}
    return (
        pack_scalars(speculation_length=options.length)
        | pack_ids("speculation_sizes", options.sizes)
        | pack_ids("speculation_choice_lengths", [len(path) for path in options.choices])
        | pack_ids("speculation_choice_ranks", [rank for path in options.choices for rank in path])
    )


def unpack_engine_speculation(tensors: Incoming) -> EngineSpeculation | None:
    """Unpack the options of an engine's own speculation; raise EngineError if a tensor is invalid."""
    if "speculation_length" not in tensors:
        return None
    length, sizes = scalar(tensors, "speculation_length"), tuple(ids(tensors, "speculation_sizes").tolist())
    if length < 1 or len(sizes) not in (0, NUM_SIZES):
        raise EngineError(
            f"speculation_length must be 1 or more, speculation_sizes must have 0 or {NUM_SIZES} numbers; "
            f"got {length}, {sizes}"
        )
    lengths = ids(tensors, "speculation_choice_lengths").tolist()
    paths = split(ids(tensors, "speculation_choice_ranks").tolist(), lengths, "speculation_choice_ranks")
    return EngineSpeculation(length, tuple(map(tuple, paths)), sizes)


def pack_engine_speculation_result(result: EngineSpeculationResult | None) -> Tensors:
    """Pack the result of an engine's own speculation, if there is one."""
    if result is None:
        return {}
    return (
        pack_text("drafted_by", result.method)
        | pack_ids("extra_ids", result.extra)
        | pack_ids("pass_lengths", result.lengths)
        | pack_scalars(num_drafted=result.num_drafted)
    )


def unpack_engine_speculation_result(tensors: Incoming) -> EngineSpeculationResult | None:
    """Unpack the result of an engine's own speculation; raise EngineError if its passes do not add up to its tokens."""
    if "pass_lengths" not in tensors:
        return None
    extra, lengths = tuple(ids(tensors, "extra_ids").tolist()), tuple(ids(tensors, "pass_lengths").tolist())
    if min(lengths, default=0) < 1 or sum(lengths) != len(extra) + 1:
        raise EngineError(f"target reports {len(extra) + 1} tokens, but passes of {lengths} tokens")
    return EngineSpeculationResult(text(tensors, "drafted_by"), extra, lengths, scalar(tensors, "num_drafted", 0))
