"""The committed tokens of the live sequences: a call has only the new ones, but the engine needs all of them."""

from __future__ import annotations

from collections.abc import Container

from orchestrator.core.context import Context
from orchestrator.core.messages.context import Delta

#: How long a sequence may go without a call. Dropping a live one costs one extra message; keeping one, a few kilobytes.
IDLE_S = 30.0


class Contexts:
    """Tokens by sequence; they take no GPU memory, because the engine finds the KV blocks of a text by its content."""

    def __init__(self) -> None:
        self._contexts: dict[int, Context] = {}
        self._used_s: dict[int, float] = {}

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self._contexts)

    def __contains__(self, sequence_id: int) -> bool:
        """Return whether a sequence is known."""
        return sequence_id in self._contexts

    def join(self, delta: Delta, now_s: float) -> list[int]:
        """Return the whole committed context; raises UnknownSequence when the tokens before the delta are not known."""
        context = self._contexts.get(delta.sequence_id, Context([]))
        delta.check_follows(context)
        context.truncate(delta.context_start)
        context.commit(delta.context_ids.tolist())
        self._contexts[delta.sequence_id] = context
        self._used_s[delta.sequence_id] = now_s
        return list(context.ids)

    def drop(self, sequence_id: int) -> None:
        """Forget a sequence."""
        self._contexts.pop(sequence_id, None)
        self._used_s.pop(sequence_id, None)

    def touch(self, sequence_id: int, now_s: float) -> None:
        """Note that a call was answered: the sequence is idle from now on, however long the call took."""
        if sequence_id in self._used_s:
            self._used_s[sequence_id] = now_s

    def drop_idle(self, now_s: float, waiting: Container[int]) -> None:
        """Forget the sequences without a call for IDLE_S; waiting: those with a call under way, which are kept.

        Invariant: no sequence is forgotten between a call's arrival and IDLE_S after its answer.
        """
        for sequence_id, used_s in list(self._used_s.items()):
            if now_s - used_s > IDLE_S and sequence_id not in waiting:
                self.drop(sequence_id)
