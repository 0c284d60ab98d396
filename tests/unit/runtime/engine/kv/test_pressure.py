"""Who holds KV blocks when there are too few for all."""

from __future__ import annotations

import pytest

from orchestrator.core.context import Context
from orchestrator.core.errors import RequestError
from orchestrator.core.messages.context import Delta, delta_of
from runtime.engine.kv.blocks import BlockPool
from runtime.engine.kv.pressure import MARGIN, BlockPressure
from runtime.engine.kv.sequences import CachedSequence, SequenceTable

SIZE = 4


class Pressed:
    """A table over few blocks, and who was preempted."""

    def __init__(self, num_blocks: int) -> None:
        self.table = SequenceTable(BlockPool(num_blocks, SIZE), 1000)
        self.preempted: list[int] = []
        self.pressure = BlockPressure(self.table, lambda sequence: self.preempted.append(sequence.sequence_id))
        self.contexts: dict[int, Context] = {}

    def open(self, sequence_id: int, num_blocks: int, others_wait: bool = False) -> CachedSequence | None:
        """Ask for so many full blocks for a sequence, whose tokens are its own."""
        context = self.contexts.setdefault(sequence_id, Context([]))
        context.commit([sequence_id] * (num_blocks * SIZE - len(context)))
        sequence = self.pressure.open(delta_of(context, 0, sequence_id, ""), 0, 0, others_wait)
        if sequence:
            sequence.num_computed = len(context) - 1
            sequence.publish(len(context))
        return sequence

    def held(self) -> dict[int, int]:
        """Return how many blocks each sequence holds."""
        return {sequence.sequence_id: len(sequence.blocks) for sequence in self.table.holders()}


def test_an_older_sequence_takes_the_blocks_of_the_youngest_and_no_more_than_it_needs() -> None:
    pressed = Pressed(12)
    for number in (1, 2, 3):
        assert pressed.open(number, 2)
    assert pressed.open(1, 8) and pressed.preempted == [] and pressed.held() == {1: 8, 2: 2, 3: 2}
    assert pressed.open(1, 9) and pressed.preempted == [3] and pressed.held() == {1: 9, 2: 2}
    assert pressed.table.num_preempted == 1


def test_a_younger_sequence_waits_for_an_older_one_and_keeps_what_it_has() -> None:
    pressed = Pressed(6)
    assert pressed.open(1, 2) and pressed.open(2, 2)
    assert pressed.open(2, 5) is None and pressed.preempted == [] and pressed.held() == {1: 2, 2: 2}
    pressed.table.drop(1)
    assert pressed.open(2, 5) and pressed.held() == {2: 5}


def test_a_sequence_that_waits_for_an_older_one_costs_nothing_until_it_may_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pressed, entered = Pressed(12), list[int]()
    enter = pressed.table.enter

    def note(delta: Delta, num_drafts: int, max_depth: int) -> CachedSequence:
        entered.append(delta.sequence_id)
        return enter(delta, num_drafts, max_depth)

    monkeypatch.setattr(pressed.table, "enter", note)
    assert pressed.open(1, 2)
    for _ in range(3):
        assert pressed.open(2, 2, others_wait=True) is None
    assert entered == [1]
    assert pressed.open(1, 3, others_wait=True) and pressed.open(2, 2), "who holds blocks goes on"


def test_a_preempted_sequence_comes_back_with_its_tokens_and_finds_its_blocks_by_content() -> None:
    pressed = Pressed(12)
    assert pressed.open(1, 2) and (young := pressed.open(2, 4))
    assert pressed.open(1, 9) and pressed.held() == {1: 9}
    assert young.ids == [2] * 16 and young.num_computed == 0 and not young.blocks
    pressed.table.drop(1)
    delta = delta_of(pressed.contexts[2], 15, 2, "")  # what is new since the last call, and no more
    assert pressed.pressure.open(delta, 0, 0, False) is young
    assert young.num_computed == 12 and len(young.blocks) == 4, "three blocks before the root were still there"
    assert young.num_cached == 0, "when it began, nothing was"


def test_a_sequence_begins_only_with_a_margin_for_those_that_run() -> None:
    pressed = Pressed(10)
    assert pressed.open(1, 4)
    assert pressed.open(2, 6 - MARGIN + 1) is None and pressed.held() == {1: 4}
    assert pressed.open(3, 6 - MARGIN, others_wait=True) is None, "an older one waits"
    assert pressed.open(3, 6 - MARGIN)


def test_blocks_that_an_older_sequence_shares_are_not_counted_as_gained() -> None:
    pressed = Pressed(10)
    assert pressed.open(1, 2)
    context = Context([7] * (3 * SIZE))
    for number in (2, 3):
        assert (sequence := pressed.pressure.open(delta_of(context, 0, number, ""), 0, 0, False))
        sequence.num_computed = len(context) - 1
        sequence.publish(len(context))
    assert pressed.table.pool.num_held == 6, "two blocks are shared"
    # The younger of the two would free one block; with what is free there are five, and six are needed.
    longer = Context([7] * (9 * SIZE))
    assert pressed.pressure.open(delta_of(longer, 0, 2, ""), 0, 0, False) is None
    assert pressed.preempted == [], "nobody loses blocks for nothing"


def test_a_sequence_that_could_never_end_is_refused_with_what_the_pool_holds() -> None:
    pressed = Pressed(5)
    pressed.table.check_capacity(20)
    with pytest.raises(RequestError, match=r"KV blocks for 21 tokens, the pool holds 20 \(kv_memory_mb"):
        pressed.table.check_capacity(21)
