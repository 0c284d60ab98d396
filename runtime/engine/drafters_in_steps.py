"""The drafters of the target's process during a burst, in which native code calls them after each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from orchestrator.core.types import HiddenStates
from orchestrator.wire.drafter import DrafterUse
from runtime.engine.local_drafter import DraftingEngine, LocalDrafter
from runtime.kv.batch import Segment
from runtime.native.decoding import Continuation, DecodedSteps
from runtime.native.drafters import ContinuedDraft, NativeDrafter, NativeUse, NativeUses

#: Maximum steps of a burst; slots for this many tokens and for a tree are reserved before it.
MAX_STEPS = 64


class DraftersInSteps:
    """The drafters that the sequences of a burst use, each locked until its sequences are settled.

    uses: what native code reads of them. A drafter that has not read a sequence's whole text does not draft for it.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.uses = NativeUses()
        self._context_lens = [segment.last for segment in segments]
        self._continued: dict[int, tuple[DrafterUse, ContinuedDraft]] = {}

    @classmethod
    @contextmanager
    def lent(
        cls,
        continuations: Sequence[Continuation],
        segments: Sequence[Segment],
        columns: Callable[[HiddenStates], slice],
    ) -> Iterator[DraftersInSteps]:
        """Lock the drafters of these sequences.

        columns: returns the columns of hidden states in the target's features.
        """
        members: dict[LocalDrafter, list[int]] = {}
        for place, each in enumerate(continuations):
            if each.drafts and isinstance(use := each.drafts.owner, DrafterUse):
                assert isinstance(use.drafter, LocalDrafter)
                members.setdefault(use.drafter, []).append(place)
        drafters = cls(segments)
        with ExitStack() as locks:
            found, uses = list[NativeDrafter](), list[NativeUse | None]([None] * len(segments))
            for drafter, places in members.items():
                engine = locks.enter_context(drafter.lend())
                ready = [
                    place for place in places if drafters._begin(place, continuations[place], segments[place], engine)
                ]
                if not ready:
                    continue
                native = engine.in_steps([drafters._continued[place][1].draft for place in ready])
                drafts = continuations[ready[0]].drafts
                assert drafts
                native.fields.first_column = columns(drafts.options.hidden_states).start
                for call, place in enumerate(ready):
                    uses[place] = NativeUse(len(found), call, drafters._continued[place][1].num_read)
                found.append(native)
            drafters.uses = NativeUses(found, uses)
            yield drafters

    def _begin(self, place: int, continuation: Continuation, segment: Segment, engine: DraftingEngine) -> bool:
        """Find out how the drafter can continue for a sequence; return False if it cannot."""
        drafts = continuation.drafts
        assert drafts and isinstance(drafts.owner, DrafterUse)
        num_ahead = min(continuation.max_tokens, MAX_STEPS)
        continued = engine.continued(drafts.owner.request, segment.sequence.context, num_ahead)
        if continued:
            self._continued[place] = drafts.owner, continued
        return continued is not None

    def settle(self, decoded: Sequence[DecodedSteps]) -> None:
        """Note what the drafters have read, and their drafts after the last steps."""
        for place, (use, (_, _, sequence)) in self._continued.items():
            each = decoded[place]
            use.num_read = each.num_read
            use.following = None if each.is_over else each.draft.tree
            if sequence is not None:
                num_drafts_read = each.num_read - self._context_lens[place] - len(each.tokens)
                drafts = each.draft.tree.tokens.tolist() if num_drafts_read > 0 else []
                sequence.extend(self._context_lens[place], each.tokens, drafts, each.num_read)
