"""The part of every engine call that identifies its sequence, and the call that releases a sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orchestrator.core.arrays import IdArray
from orchestrator.core.context import Context
from orchestrator.core.errors import UnknownSequence
from orchestrator.core.messages.tensors import Incoming, Tensors, ids, pack_scalars, pack_text, scalar, table, text


@dataclass(frozen=True, eq=False)
class Delta:
    """The committed tokens that an engine has not seen yet, and the hash of those before them.

    context_ids: (n,) int32, token ids from position context_start on; the last one is the root.
    context_hash: rolling hash of the ids before context_start.
    """

    sequence_id: int
    context_start: int
    context_ids: IdArray
    context_hash: int
    prompt_len: int
    cache_salt: str = ""

    @property
    def prefix_len(self) -> int:
        """Number of committed tokens."""
        return self.context_start + len(self.context_ids)

    def check_follows(self, context: Context) -> None:
        """Raise UnknownSequence unless an engine's copy of the context begins with the tokens before this delta."""
        start = self.context_start
        if start > len(context) or context.rolling_hash(start) != self.context_hash:
            raise UnknownSequence(f"tokens before {start} of sequence {self.sequence_id}")


def delta_of(context: Context, start: int, sequence_id: int, cache_salt: str) -> Delta:
    """Return the delta for an engine that already has the first `start` tokens."""
    new_ids = np.array(context.ids[start:], np.int32)
    return Delta(sequence_id, start, new_ids, context.rolling_hash(start), context.prompt_len, cache_salt)


def pack_delta(delta: Delta) -> Tensors:
    """Pack a delta."""
    tensors: Tensors = {
        "sequence_id": np.array([delta.sequence_id], np.uint64),
        "context_ids": delta.context_ids,
        "context_hash": np.array([delta.context_hash], np.uint64),
    }
    tensors |= pack_scalars(context_start=delta.context_start, prompt_len=delta.prompt_len)
    return tensors | pack_text("cache_salt", delta.cache_salt)


def unpack_delta(tensors: Incoming) -> Delta:
    """Unpack a delta; raise EngineError if the sequence id is missing, or a tensor is invalid."""
    return Delta(
        scalar(tensors, "sequence_id"),
        scalar(tensors, "context_start", 0),
        ids(tensors, "context_ids"),
        scalar(tensors, "context_hash", 0),
        scalar(tensors, "prompt_len", 0),
        text(tensors, "cache_salt"),
    )


def pack_release(sequence_id: int) -> Tensors:
    """Pack the call that releases a sequence."""
    return {"sequence_id": np.array([sequence_id], np.uint64), "release": np.array([True], np.bool_)}


def released_sequence(tensors: Incoming) -> int:
    """Return the id of the sequence that a call releases, or 0 if the call is not a release.

    Raises EngineError if the id is missing, or `release` is not one bool.
    """
    release = table(tensors, "release", np.bool_, 1, 1)
    return scalar(tensors, "sequence_id") if release is not None and release[0] else 0
