"""The drafters that native code calls between the steps of a burst (drafters.h)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import Array, Structure, c_int32, c_void_p
from typing import NamedTuple

from native.head_fields import DraftCallFields
from runtime.engine.kv.cache import KVCache
from runtime.engine.kv.sequences import CachedSequence
from runtime.models.native.draft_calls import NativeDraft, calls_of, shapes_of
from runtime.models.native.rotations import Rotations

#: max_positions of a drafter that has no limit of its own.
UNLIMITED = (1 << 31) - 1


class DrafterFields(Structure):
    """A head or a draft model, as `native::Drafter`; the arrays must outlive the call."""

    _fields_ = [
        *((name, c_void_p) for name in (
            "head", "model", "cache", "states", "cosines", "sines", "blocks", "choice_parents", "choice_ranks",
        )),
        *((name, c_int32) for name in (
            "num_blocks", "num_choices", "num_positions", "num_slots", "block_tokens", "max_positions", "first_column",
            "num_threads",
        )),
    ]  # fmt: skip


class DrafterUseFields(Structure):
    """How a sequence is drafted for, as `native::DrafterUse`."""

    _fields_ = [("drafter", c_int32), ("num_read", c_int32), ("call", DraftCallFields)]


class ContinuedDraft(NamedTuple):
    """How a drafter continues for one sequence.

    num_read: as in `NativeUse`. sequence: the drafter's own, if it keeps rows.
    """

    draft: NativeDraft
    num_read: int
    sequence: CachedSequence | None = None


class NativeDrafter:
    """A head or a draft model, whichever has a handle, and its calls: one for each sequence that it drafts for.

    drafts: what does not change from draft to draft; their rows and features are not read.
    cache: the drafter's, None if it keeps nothing between calls. max_positions: the longest context and draft.
    note_time: called with the number of sequences, the threads and the seconds of each draft, to choose threads by.
    """

    def __init__(
        self,
        drafts: Sequence[NativeDraft],
        cache: KVCache | None,
        max_positions: int,
        num_threads: int,
        note_time: Callable[[int, int, float], None] | None,
        head: c_void_p | None = None,
        model: c_void_p | None = None,
        rotations: Rotations | None = None,
    ) -> None:
        self.calls: Array[DraftCallFields] = calls_of(drafts)
        self._note_time = note_time
        self._arrays = arrays = shapes_of(drafts)
        self.fields = fields = DrafterFields(
            head=head,
            model=model,
            blocks=arrays["blocks"].ctypes.data,
            choice_parents=arrays["choice_parents"].ctypes.data,
            choice_ranks=arrays["choice_ranks"].ctypes.data,
            num_blocks=len(arrays["blocks"]),
            num_choices=len(arrays["choice_ranks"]),
            max_positions=max_positions,
            num_threads=num_threads,
        )
        if cache is not None:
            fields.cache, fields.num_slots = cache.kv.data_ptr(), cache.kv.shape[3]
            fields.block_tokens = cache.block_tokens
            fields.states = cache.features.data_ptr() if cache.features.shape[1] else None
        if rotations is not None:
            fields.cosines, fields.sines = rotations.cosines.ctypes.data, rotations.sines.ctypes.data
            fields.num_positions = len(rotations.cosines)
            self._rotations = rotations.cosines, rotations.sines  # keeps them alive if longer tables replace them

    def note_times(self, draft_us: Sequence[int]) -> None:
        """Note how long the drafts after each step have taken."""
        if self._note_time:
            for us in draft_us:
                self._note_time(len(self.calls), self.fields.num_threads, 1e-6 * us)


class NativeUse(NamedTuple):
    """Which drafter drafts for a sequence, which of the drafter's calls is the sequence's, and what it has read.

    num_read: how many tokens the drafter has read, at least all up to the root.
    """

    drafter: int
    call: int
    num_read: int


class NativeUses(NamedTuple):
    """The drafters of a burst. uses: for each sequence, None for one without a drafter."""

    drafters: Sequence[NativeDrafter] = ()
    uses: Sequence[NativeUse | None] = ()

    def fields_of(self, sequence: int) -> DrafterUseFields:
        """Return what native code reads of a sequence's drafter."""
        use = self.uses[sequence] if self.uses else None
        if use is None:
            return DrafterUseFields(drafter=-1)
        return DrafterUseFields(use.drafter, use.num_read, self.drafters[use.drafter].calls[use.call])
