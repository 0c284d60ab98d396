"""Decides which sequences hold KV blocks when there are too few for all: the oldest do, and the others wait.

A sequence that needs blocks takes those of the youngest ones: they are preempted, wait, and go on with the same text,
most of it from their own published blocks. So every sequence that fits into the pool alone finishes.
Source: recomputation in vLLM, Kwon et al. 2023, arXiv:2309.06180, Section 4.5.
"""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.core.messages.context import Delta
from runtime.engine.kv.sequences import CachedSequence, SequenceTable

#: A sequence begins, or comes back, only if this many blocks stay available for each other sequence that holds blocks:
#: otherwise the next step of an older one would preempt it again.
MARGIN = 2


class BlockPressure:
    """Opens sequences, and preempts younger sequences for older ones.

    on_preempt: called with each sequence that has lost its blocks.
    Invariant: of the sequences that have a call, the oldest always gets its blocks.
    """

    def __init__(self, sequences: SequenceTable, on_preempt: Callable[[CachedSequence], None]) -> None:
        self._sequences, self._on_preempt = sequences, on_preempt

    def open(self, delta: Delta, num_drafts: int, max_depth: int, others_wait: bool) -> CachedSequence | None:
        """Return the call's sequence with slots for its drafts, None if it must wait; raises as `SequenceTable.enter`.

        others_wait: an older sequence waits for blocks, so a sequence without blocks may not begin.
        """
        is_within = bool(self._sequences.blocks_of(delta.sequence_id))
        if others_wait and not is_within:
            return None  # before any work on it, because the question comes again before every pass
        sequence = self._sequences.enter(delta, num_drafts, max_depth)
        num_slots = delta.prefix_len + num_drafts
        missing = sequence.num_missing_blocks(num_slots)
        if not (is_within or self._has_room(missing, sequence)):
            sequence.preempt()
            return None
        if missing > self._sequences.pool.num_available and not self._preempt_for(sequence, missing):
            return None
        sequence.reserve(num_slots)
        return sequence

    def _has_room(self, missing: int, sequence: CachedSequence) -> bool:
        """Return whether a sequence may begin without being preempted soon."""
        num_others = sum(other is not sequence for other in self._sequences.holders())
        return missing + MARGIN * num_others <= self._sequences.pool.num_available

    def _preempt_for(self, sequence: CachedSequence, missing: int) -> bool:
        """Preempt the youngest sequences until `missing` blocks are available; if all were not enough, return False."""
        pool = self._sequences.pool
        younger = [other for other in self._sequences.holders() if other.number > sequence.number]
        kept = {block for other in self._sequences.holders() if other not in younger for block in other.blocks}
        freed = {block for other in younger for block in other.blocks} - kept
        if missing > pool.num_available + len(freed):
            return False
        while missing > pool.num_available:
            victim = younger.pop()
            victim.preempt()
            self._sequences.num_preempted += 1
            self._on_preempt(victim)
        return True
