"""The drafters of the target's process during a burst, in which native code calls them after each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from orchestrator.core.messages.drafter import DrafterUse
from orchestrator.core.proposal import NAME_BITS, NativeDrafts
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import HiddenStates
from runtime.engine.bursts import Planned, StepCall
from runtime.engine.calls import BurstRequest, Progress
from runtime.engine.kv.batch import Segment
from runtime.engine.local_drafter import DraftingEngine, LocalDrafter
from runtime.models.native.decoding import DecodedSteps, Draft
from runtime.models.native.drafters import ContinuedDraft, NativeDrafter, NativeUse, NativeUses

#: Maximum steps of a burst; KV slots for this many tokens and for a tree are reserved before it begins.
MAX_STEPS = 64


class BurstDrafters:
    """The drafters that some of the sequences of a burst use, borrowed until the burst is over.

    are_ready: each of them has read all of its sequences' text, so that the burst can begin. uses: for native code.
    """

    def __init__(self) -> None:
        self.are_ready, self.uses = True, NativeUses()
        self._loans: list[tuple[LocalDrafter, list[_Loan]]] = []

    @classmethod
    @contextmanager
    def borrowed(
        cls, planned: Planned, progress: Progress, columns: Callable[[HiddenStates], slice]
    ) -> Iterator[BurstDrafters]:
        """Borrow the drafters of these calls.

        progress: of the target's engine. columns: returns where hidden states are in the target's features.
        """
        drafters = cls()
        with ExitStack() as stack:
            uses: list[NativeUse | None] = [None] * len(planned)
            for drafter, places in _members(planned).items():
                engine = stack.enter_context(drafter.lend(progress))
                found = [_loan_of(engine, *planned[place], place) for place in places]
                ready = [each for each in found if each]
                drafters.are_ready &= len(ready) == len(places)
                drafters._loans.append((drafter, ready))
                for number, loan in enumerate(ready):
                    uses[loan.place] = NativeUse(len(drafters._loans) - 1, number, loan.continued.num_read)
            if drafters.are_ready and drafters._loans:
                drafters.uses = NativeUses(drafters._natives(columns), uses)
            try:
                yield drafters
            except Exception:
                drafters._forget()
                raise

    def settle(self, decoded: Sequence[DecodedSteps]) -> None:
        """Note what the drafters have read, and their drafts after the last steps."""
        for drafter, members in self._loans:
            num_steps = [len(decoded[each.place].steps) for each in members]
            drafter.count(sum(num_steps), max(num_steps))
            for each in members:
                each.settle(decoded[each.place])

    def _natives(self, columns: Callable[[HiddenStates], slice]) -> list[NativeDrafter]:
        natives = []
        for drafter, members in self._loans:
            native = drafter.engine.burst_drafter([each.continued.draft for each in members])
            native.fields.first_column = columns(members[0].hidden_states).start
            natives.append(native)
        return natives

    def _forget(self) -> None:
        """Forget the rows of drafts, which a burst that failed may have overwritten."""
        for _, members in self._loans:
            for each in members:
                if sequence := each.continued.sequence:
                    sequence.extend(each.context_len, (), (), min(sequence.num_computed, each.context_len))


class _Loan(NamedTuple):
    """A drafter's part in a burst for the sequence at this place.

    number: the drafter's among the methods of the sequence. context_len: of its text before the burst.
    """

    place: int
    number: int
    use: DrafterUse
    continued: ContinuedDraft
    hidden_states: HiddenStates
    context_len: int

    def settle(self, decoded: DecodedSteps) -> None:
        """Note what the drafter has read, and its draft after the last step."""
        drafted = self._drafted(decoded.draft)
        self.use.num_read = decoded.num_read
        self.use.following = None if decoded.is_over else drafted
        if sequence := self.continued.sequence:
            has_read_drafts = decoded.num_read > self.context_len + len(decoded.tokens)
            drafts = drafted.tokens.tolist() if has_read_drafts else []
            sequence.extend(self.context_len, decoded.tokens, drafts, decoded.num_read)

    def _drafted(self, draft: Draft) -> TokenTree:
        """Return the drafter's part of a tree; merged with the other methods' trees again, it gives the same tree."""
        is_own = np.array(draft.names, np.int32) >> NAME_BITS * self.number & (1 << NAME_BITS) - 1
        return draft.tree.only(np.flatnonzero(is_own).astype(np.int32) + 1)


def _members(planned: Planned) -> dict[LocalDrafter, list[int]]:
    """Return the places of the calls that each drafter drafts for in native code."""
    members: dict[LocalDrafter, list[int]] = {}
    for place, (call, _) in enumerate(planned):
        for each in _methods_of(call):
            if isinstance(use := each.owner, DrafterUse):
                assert isinstance(use.drafter, LocalDrafter)
                members.setdefault(use.drafter, []).append(place)
    return members


def _methods_of(call: StepCall) -> tuple[NativeDrafts, ...]:
    """Return the methods that draft for a call in native code."""
    request = call.request
    drafts = request.continuation.drafts if isinstance(request, BurstRequest) else None
    return drafts.members_or_self if drafts else ()


def _loan_of(engine: DraftingEngine, call: StepCall, segment: Segment, place: int) -> _Loan | None:
    """Return a drafter's part in a burst for a call; None if it has not read all of the text."""
    request, context, methods = call.request, segment.sequence.context, _methods_of(call)
    assert isinstance(request, BurstRequest)
    number, drafts, use = next(
        (number, each, each.owner) for number, each in enumerate(methods) if isinstance(each.owner, DrafterUse)
    )
    num_ahead = min(request.continuation.max_tokens, MAX_STEPS)
    # In a union, its share of the nodes is another one at each step; drafts.max_nodes is the maximum.
    continued = engine.continued(replace(use.request, max_nodes=drafts.max_nodes), context, num_ahead)
    if continued is None:
        return None
    if len(methods) > 1:  # the drafts that it has read may not be those that are accepted
        continued = continued._replace(num_read=len(context))
    return _Loan(place, number, use, continued, drafts.options.hidden_states, len(context))
