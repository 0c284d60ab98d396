"""Token statistics from counts written by hand."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from orchestrator.drafting.tables import Level, Tables, VocabularyFingerprint, packed

Counted = Mapping[tuple[int, ...], Mapping[int, float]]


def tables_of(counted: Counted, vocab_size: int) -> Tables:
    """Return the tables for {context: {follower: weight}}."""
    levels = []
    for size in range(max(map(len, counted)) + 1):
        contexts = sorted((packed(c, vocab_size), sorted(f.items())) for c, f in counted.items() if len(c) == size)
        rows = [row for _, followers in contexts for row in followers]
        levels.append(
            Level(
                np.array([key for key, _ in contexts], np.int64),
                np.cumsum([0, *(len(followers) for _, followers in contexts)]),
                np.array([token for token, _ in rows], np.int64),
                np.array([weight for _, weight in rows]),
            )
        )
    return Tables(VocabularyFingerprint(vocab_size, "0" * 64), tuple(levels))
