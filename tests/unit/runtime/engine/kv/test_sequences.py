"""Sequences against a memory that remembers what was written where: random scripts of steps, rollbacks and refusals."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from orchestrator.core.context import Context
from orchestrator.core.errors import EngineError, RequestError, Unavailable, UnknownSequence
from orchestrator.core.messages.context import Delta, delta_of
from runtime.engine.kv.blocks import BlockPool
from runtime.engine.kv.sequences import CachedSequence, SequenceTable

SIZE = 4


@dataclass
class Memory:
    """Stands for the KV cache: a slot holds the whole prefix whose last token's row was computed into it.

    A row is right when it holds its own prefix: a key depends on all tokens before it.
    """

    table: SequenceTable
    rows: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def compute(self, sequence: CachedSequence, num_drafts: int = 0) -> None:
        """Run the pass that an engine would: what is not computed, and rubbish for drafts after it."""
        for index in range(sequence.num_computed, len(sequence.ids)):
            self.write(sequence, index, tuple(sequence.ids[: index + 1]))
        for index in range(len(sequence.ids), len(sequence.ids) + num_drafts):
            self.write(sequence, index, (-1,))
        sequence.num_computed = len(sequence.ids)

    def write(self, sequence: CachedSequence, index: int, row: tuple[int, ...]) -> None:
        slot = sequence.slot(index)
        assert slot // SIZE not in self.table.pool._keys, "a published block was written"
        self.rows[slot] = row

    def check(self) -> None:
        """The law of CachedSequence, for all that live."""
        for sequence in self.table._live.values():
            for index in range(sequence.num_computed):
                assert self.rows[sequence.slot(index)] == tuple(sequence.ids[: index + 1])


@dataclass
class Sender:
    """The loop's side of one request: its context, and how much of it the engine has seen."""

    sequence_id: int
    context: Context
    salt: str = ""
    sent: int = 0

    def delta(self, start: int | None = None) -> Delta:
        return delta_of(self.context, self.sent if start is None else start, self.sequence_id, self.salt)


def make_table(num_blocks: int = 40, max_positions: int = 200) -> SequenceTable:
    return SequenceTable(BlockPool(num_blocks, SIZE), max_positions)


class Script:
    """A random life of some senders and one engine; every move ends with the laws checked."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.table = make_table()
        self.memory = Memory(self.table)
        self.senders: list[Sender] = []
        self.num_ids = 0
        self.num_adopted = self.num_refused = self.num_rolled_back = 0
        self.shared = self.tokens(60)

    def tokens(self, count: int) -> list[int]:
        return self.rng.integers(0, 3, count).tolist()

    def begin(self) -> None:
        """A new request; many share a part of their prompt, some under another salt."""
        self.num_ids += 1
        prompt = self.shared[: self.rng.integers(0, 40)] + self.tokens(int(self.rng.integers(1, 10)))
        salt = str(self.rng.choice(["", "", "", "other"]))
        self.senders.append(Sender(self.num_ids, Context(prompt), salt))

    def end(self, sender: Sender) -> None:
        self.senders.remove(sender)
        if self.rng.random() < 0.7:
            self.table.drop(sender.sequence_id)
        else:
            self.table.drop_idle(float(self.rng.choice([1.0, 9.0])), set())

    def go_back(self, sender: Sender) -> None:
        """The sender's context is another one from some token on, and it resends from there or from before."""
        length = int(self.rng.integers(1, len(sender.context) + 1))
        sender.context = Context(sender.context.ids[:length] + self.tokens(int(self.rng.integers(0, 4))))
        common = min(length, sender.sent, len(sender.context) - 1)
        sender.sent = int(self.rng.integers(0, common + 1))
        self.num_rolled_back += 1

    def step(self, sender: Sender) -> None:
        """One call of an engine: open, compute, let drafts run ahead or commit what was accepted."""
        num_drafts = int(self.rng.integers(0, 7))
        sequence = self.open(sender, num_drafts)
        if sequence is None:
            return
        assert sequence.ids == sender.context.ids
        assert 0 <= sequence.num_computed < len(sequence.ids)
        assert len(sequence.blocks) * SIZE >= len(sequence.ids) + num_drafts
        self.memory.compute(sequence, num_drafts)
        sequence.publish(len(sender.context))
        sender.sent = len(sender.context)
        emitted = self.tokens(1 + int(self.rng.integers(0, num_drafts + 1)))
        if self.rng.random() < 0.5:
            self.draft_ahead(sequence, num_drafts)
        else:
            self.accept(sequence, emitted)
        sender.context.commit(emitted)

    def accept(self, sequence: CachedSequence, emitted: list[int]) -> None:
        """As the target does: the accepted drafts' rows are there already, the last token's is not."""
        num_known = len(sequence.ids)
        sequence.context.commit(emitted)
        for index in range(num_known, len(sequence.ids) - 1):
            self.memory.write(sequence, index, tuple(sequence.ids[: index + 1]))
        sequence.num_computed = len(sequence.ids) - 1
        sequence.publish(len(sequence.ids))

    def draft_ahead(self, sequence: CachedSequence, num_drafts: int) -> None:
        """As the draft engine does: its sequence runs ahead of the sender's by tokens that may be wrong."""
        prefix_len = len(sequence.ids)
        for _ in range(num_drafts):
            sequence.context.commit(self.tokens(1))
            if self.rng.random() < 0.9:
                self.memory.compute(sequence)
                sequence.publish(prefix_len)

    def open(self, sender: Sender, num_drafts: int) -> CachedSequence | None:
        known = sender.sequence_id in self.table._live
        try:
            sequence = self.table.open(sender.delta(), num_drafts, min(num_drafts, 3))
        except UnknownSequence:
            assert sender.sent and not known, "a sequence that lives must know its own tokens"
            sender.sent = 0
            return self.open(sender, num_drafts)
        except Unavailable:
            assert sender.sequence_id not in self.table._live
            self.num_refused += 1
            return None
        except RequestError:
            self.end(sender)
            return None
        self.num_adopted += not known and sequence.num_computed > 0
        return sequence

    def move(self) -> None:
        """Make one random move."""
        choice = self.rng.random()
        if len(self.senders) < 3 or (choice < 0.1 and len(self.senders) < 7):
            self.begin()
        sender = self.senders[int(self.rng.integers(len(self.senders)))]
        if choice > 0.95:
            self.end(sender)
        elif choice > 0.85:
            self.go_back(sender)
        else:
            self.step(sender)
        self.memory.check()


def test_random_scripts_keep_the_laws() -> None:
    scripts = [Script(seed) for seed in range(12)]
    for script in scripts:
        for _ in range(150):
            script.move()
        for sequence_id in range(script.num_ids + 1):
            script.table.drop(sequence_id)
        assert len(script.table) == 0
        assert script.table.pool.num_held == 0
    assert sum(s.num_adopted for s in scripts) > 50
    assert sum(s.num_refused for s in scripts) > 20
    assert sum(s.num_rolled_back for s in scripts) > 50


def run(memory: Memory, sender: Sender, start: int | None = None) -> CachedSequence:
    """One step without drafts."""
    sequence = memory.table.open(sender.delta(start), 0, 0)
    memory.compute(sequence)
    sequence.publish(len(sender.context))
    sender.sent = len(sender.context)
    return sequence


@pytest.mark.parametrize(
    ("length", "adopted"),
    # Blocks of four; the root is always computed anew, for its logits.
    [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (14, 12)],
)
def test_a_new_sequence_adopts_whole_blocks_before_its_root(length: int, adopted: int) -> None:
    memory = Memory(make_table())
    run(memory, Sender(1, Context(list(range(14)))))
    sequence = memory.table.open(Sender(2, Context(list(range(length)))).delta(), 0, 0)
    assert (sequence.num_computed, sequence.num_cached) == (adopted, adopted)
    memory.check()


def test_a_sequence_adopts_only_up_to_the_first_difference() -> None:
    memory = Memory(make_table())
    run(memory, Sender(1, Context(list(range(16)))))
    other = [*range(5), 99, *range(6, 16)]
    assert memory.table.open(Sender(2, Context(other)).delta(), 0, 0).num_computed == 4


def test_drafts_are_not_found_by_others_before_they_are_committed() -> None:
    memory = Memory(make_table())
    sender = Sender(1, Context([1, 2]))
    sequence = memory.table.open(sender.delta(), 8, 8)
    sequence.context.commit([3, 4, 5, 6, 7, 8])
    memory.compute(sequence)
    sequence.publish(len(sender.context))
    drafted = Sender(2, Context([1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert memory.table.open(drafted.delta(), 0, 0).num_computed == 0


def test_going_back_leaves_published_blocks_as_they_are() -> None:
    memory = Memory(make_table())
    sender = Sender(1, Context(list(range(16))))
    before = list(run(memory, sender).blocks)
    sender.context = Context([*range(6), 77, 78, 79])
    after = run(memory, sender, start=0).blocks
    assert after[0] == before[0] and not set(after[1:]) & set(before)
    assert memory.table.open(Sender(2, Context(list(range(16)))).delta(), 0, 0).num_computed == 12
    memory.check()


def test_foreign_tokens_before_the_start_are_refused_and_change_nothing() -> None:
    memory = Memory(make_table())
    sender = Sender(1, Context([5, 6, 7, 8, 9]))
    sequence = run(memory, sender)
    for start, ids in ((3, [5, 6, 0, 8, 9, 10]), (5, [5, 6, 7, 8, 0, 1]), (6, [5, 6, 7, 8, 9, 1, 2])):
        with pytest.raises(UnknownSequence):
            memory.table.open(Sender(1, Context(ids)).delta(start), 0, 0)
        assert sequence.ids == [5, 6, 7, 8, 9]
    with pytest.raises(UnknownSequence):
        memory.table.open(Sender(2, Context([5, 6])).delta(1), 0, 0)
    assert len(memory.table) == 1


def test_what_cannot_ever_fit_is_refused_with_the_reason() -> None:
    table = make_table(num_blocks=5, max_positions=40)
    long = Context(list(range(40)))
    with pytest.raises(EngineError, match="empty"):
        table.open(Sender(1, Context([])).delta(), 0, 0)
    with pytest.raises(RequestError, match="41 tokens of context and draft exceed the model's 40 positions"):
        table.open(Sender(1, long).delta(), 9, 1)
    with pytest.raises(RequestError, match="40 tokens needs 10 KV blocks, the pool has 5"):
        table.open(Sender(1, long).delta(), 0, 0)
    with pytest.raises(RequestError, match="20 tokens needs 6 KV blocks"):
        table.open(Sender(1, Context(list(range(20)))).delta(), 1, 1)
    assert len(table) == 0 and table.pool.num_free == 5


def test_a_full_pool_refuses_the_new_one_and_gives_back_what_it_held() -> None:
    memory = Memory(make_table(num_blocks=5))
    run(memory, Sender(1, Context(list(range(12)))))
    with pytest.raises(Unavailable, match="KV pool full: 3 blocks needed"):
        memory.table.open(Sender(2, Context([*range(8), 70, 71, 72, 73, 74, 75, 76, 77, 78])).delta(), 0, 0)
    assert 2 not in memory.table._live and memory.table.pool.num_held == 3
    memory.check()


def test_silent_sequences_lose_their_blocks_but_not_those_with_a_call_under_way() -> None:
    memory = Memory(make_table())
    for sequence_id, last_used_s in ((1, 10.0), (2, 10.0), (3, 11.9)):
        run(memory, Sender(sequence_id, Context([sequence_id] * 9))).last_used_s = last_used_s
    memory.table.drop_idle(12.1, busy={2})
    assert [i in memory.table._live for i in (1, 2, 3)] == [False, True, True]
    assert memory.table.open(Sender(4, Context([1] * 9)).delta(), 0, 0).num_computed == 8
