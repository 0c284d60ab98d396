"""The part of every engine call that identifies its sequence, and the call that releases it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orchestrator.core.arrays import IdArray
from orchestrator.core.context import Context
from orchestrator.core.errors import UnknownSequence


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


@dataclass(frozen=True)
class Release:
    """The call that releases a sequence; a hint, on which correctness does not depend."""

    sequence_id: int
