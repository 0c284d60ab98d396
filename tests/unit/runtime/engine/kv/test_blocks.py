"""The block pool against a naive model, and what it does drawn as small figures."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from orchestrator.core.errors import Unavailable
from runtime.engine.kv.blocks import BlockKey, BlockPool

ROOT = BlockKey.root("")
KEYS = [ROOT.child([i]) for i in range(6)] + [ROOT.child([i]).child([j]) for i in range(3) for j in range(4)]


def keep_chain(pool: BlockPool, *tokens: int) -> list[BlockKey]:
    """Let go of a chain of blocks that can be found again; one token a block."""
    blocks = pool.allocate(len(tokens), None)
    keys = [ROOT]
    for block, token in zip(blocks, tokens, strict=True):
        keys.append(keys[-1].child([token]))
        pool.publish(block, keys[-1])
    pool.release(blocks)
    return keys[1:]


def is_kept(pool: BlockPool, key: BlockKey) -> bool:
    block = pool.find(key)
    if block is not None:
        pool.release([block])
    return block is not None


def test_allocation_is_one_run_and_goes_on_behind_the_last_block() -> None:
    pool = BlockPool(16, 4)
    assert pool.allocate(2, None) == [0, 1]  # ##..............
    assert pool.allocate(2, None) == [9, 10]  # ##.......##.....  the middle of the room
    assert pool.allocate(3, 1) == [2, 3, 4]  # #####....##.....
    assert pool.allocate(5, 10) == [11, 12, 13, 14, 15]


def test_a_chain_is_evicted_from_its_end() -> None:
    pool = BlockPool(4, 4)
    keys = keep_chain(pool, 1, 2, 3, 4)
    blocks = pool.allocate(1, None)
    assert [is_kept(pool, key) for key in keys] == [True, True, True, False]
    pool.release(blocks)  # what was evicted has no content any more
    assert (pool.num_free, pool.num_cached) == (1, 3)


def test_the_least_recently_used_chain_is_evicted_first() -> None:
    pool = BlockPool(4, 4)
    old, new = keep_chain(pool, 1, 2), keep_chain(pool, 3, 4)
    assert is_kept(pool, old[1]) and is_kept(pool, old[0])  # used again, as a chain is let go
    pool.allocate(2, None)
    assert [is_kept(pool, key) for key in old + new] == [True, True, False, False]


def test_a_block_is_held_until_its_last_holder_lets_go() -> None:
    pool = BlockPool(2, 4)
    (key,) = keep_chain(pool, 1)
    first, second = pool.find(key), pool.find(key)
    assert first == second is not None
    pool.release([first])
    assert pool.num_held == 1
    assert pool.allocate(1, None) != [first]
    with pytest.raises(Unavailable):
        pool.allocate(1, None)
    pool.release([second])
    assert pool.num_cached == 1


def test_full_pool_names_the_need_and_takes_nothing() -> None:
    pool = BlockPool(4, 4)
    pool.allocate(3, None)
    with pytest.raises(Unavailable, match=r"2 blocks needed, 1 of 4 available \(kv_memory_mb"):
        pool.allocate(2, None)
    assert (pool.num_free, pool.num_held) == (1, 3)


def test_keys_differ_by_salt_by_ids_and_by_what_stands_before() -> None:
    ids = [1, 2, 3, 4]
    keys = {
        BlockKey.root(salt).child(before).child(ids)
        for salt in ("", "a", "b")
        for before in ([9, 9, 9, 9], [9, 9, 9, 8], [])
    }
    assert len(keys) == 9
    assert BlockKey.root("a").child(ids) == BlockKey.root("a").child(ids)


@dataclass
class NaiveModel:
    """What the pool should know, kept in the plainest way. cached: oldest first."""

    holders: Counter[int] = field(default_factory=Counter)
    content: dict[BlockKey, int] = field(default_factory=dict)
    cached: list[int] = field(default_factory=list)

    def hold(self, block: int) -> None:
        self.holders[block] += 1
        if block in self.cached:
            self.cached.remove(block)

    def release(self, block: int) -> None:
        self.holders[block] -= 1
        if not self.holders[block]:
            del self.holders[block]
            if block in self.content.values():
                self.cached.append(block)

    def evict(self, count: int) -> None:
        gone, self.cached = self.cached[:count], self.cached[count:]
        self.content = {key: block for key, block in self.content.items() if block not in gone}


class PoolMachine(RuleBasedStateMachine):
    """Allocations, publications, finds and releases in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.num_blocks = 20
        self.pool = BlockPool(self.num_blocks, 4)
        self.model = NaiveModel()
        self.holdings: list[list[int]] = []

    @rule(count=st.integers(0, 9), after=st.one_of(st.none(), st.integers(0, 19)))
    def allocate(self, count: int, after: int | None) -> None:
        num_free, num_cached = self.pool.num_free, self.pool.num_cached
        if count > num_free + num_cached:
            with pytest.raises(Unavailable, match=f"{count} blocks needed, {num_free + num_cached} of 20"):
                self.pool.allocate(count, after)
            assert (self.pool.num_free, self.pool.num_cached) == (num_free, num_cached)
            return
        blocks = self.pool.allocate(count, after)
        num_evicted = num_cached - self.pool.num_cached
        assert num_evicted < max(count - num_free, 0) + self.num_blocks // 8
        self.model.evict(num_evicted)
        assert len(set(blocks)) == count
        assert not self.model.holders.keys() & set(blocks), "a held block was given away"
        assert not set(self.model.content.values()) & set(blocks), "a block that can be found was given away"
        for block in blocks:
            self.model.hold(block)
        self.holdings.append(blocks)

    @precondition(lambda self: self.holdings)
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def publish(self, data: st.DataObject, key: BlockKey) -> None:
        private = [b for b in self.model.holders if b not in self.model.content.values()]
        if private:
            block = data.draw(st.sampled_from(private))
            self.pool.publish(block, key)
            self.model.content.setdefault(key, block)

    @precondition(lambda self: self.holdings)
    @rule(data=st.data(), keys=st.permutations(KEYS))
    def publish_all_and_release(self, data: st.DataObject, keys: list[BlockKey]) -> None:
        blocks = self.holdings.pop(data.draw(st.integers(0, len(self.holdings) - 1)))
        for block, key in zip(blocks, keys, strict=False):
            if block not in self.model.content.values():
                self.pool.publish(block, key)
                self.model.content.setdefault(key, block)
        self.pool.release(blocks)
        for block in reversed(blocks):
            self.model.release(block)

    @rule(key=st.sampled_from(KEYS))
    def find(self, key: BlockKey) -> None:
        block = self.pool.find(key)
        assert block == self.model.content.get(key)
        if block is not None:
            self.model.hold(block)
            self.holdings.append([block])

    @rule(key=st.sampled_from(KEYS))
    def find_with_one_digest_and_other_ids(self, key: BlockKey) -> None:
        assert self.pool.find(BlockKey(key.digest, b"others")) is None

    @precondition(lambda self: self.holdings)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holdings) - 1))
        blocks = self.holdings.pop(index)
        self.pool.release(blocks)
        for block in reversed(blocks):
            self.model.release(block)

    @invariant()
    def every_block_is_free_cached_or_held(self) -> None:
        pool, model = self.pool, self.model
        assert pool.num_free + pool.num_cached + pool.num_held == self.num_blocks
        assert pool.num_held == len(model.holders)
        assert pool.num_cached == len(model.cached)

    def teardown(self) -> None:
        for key in KEYS:
            self.find(key)
        for blocks in self.holdings:
            self.pool.release(blocks)
        assert self.pool.num_held == 0


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_pool_equals_the_naive_model = PoolMachine.TestCase
