"""The block pool against a naive model: lists, searched from end to end."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stage03_engine.core.block_pool import NULL_BLOCK, BlockPool
from stage03_engine.core.features.debug.scheduler_checks import check_pool
from stage03_engine.core.features.scheduler_watch.scheduler_watch import cached_blocks

NUM_BLOCKS = 9


class BlockPoolMachine(RuleBasedStateMachine):
    """The model: the free blocks in order of reuse, reference counts, and the hash that each block has."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.free = list(range(1, NUM_BLOCKS))
        self.references: dict[int, int] = {}
        self.hash_of: dict[int, bytes] = {}

    @rule(count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count: int) -> None:
        if count > len(self.free):
            with pytest.raises(ValueError, match="free"):
                self.pool.allocate(count)
            return
        expected, self.free = self.free[:count], self.free[count:]
        assert self.pool.allocate(count) == expected
        for block in expected:
            self.references[block] = 1
            self.hash_of.pop(block, None)

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def free_one(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.references)))
        self.pool.free([block])
        self.references[block] -= 1
        if self.references[block] == 0:
            del self.references[block]
            if block in self.hash_of:
                self.free.append(block)
            else:
                self.free.insert(0, block)

    @precondition(lambda self: self.references)
    @rule(data=st.data(), number=st.integers(0, 5))
    def cache(self, data: st.DataObject, number: int) -> None:
        block, block_hash = data.draw(st.sampled_from(sorted(self.references))), bytes([number])
        if block in self.hash_of:
            return
        is_new = block_hash not in self.hash_of.values()
        assert self.pool.cache(block, block_hash) == is_new
        if is_new:
            self.hash_of[block] = block_hash

    @rule(number=st.integers(0, 5))
    def hit(self, number: int) -> None:
        expected = next((block for block, block_hash in self.hash_of.items() if block_hash == bytes([number])), None)
        assert self.pool.lookup(bytes([number])) == expected
        if expected is not None:
            assert self.pool.num_free_among([expected]) == (expected in self.free)
            self.pool.touch([expected])
            if expected in self.free:
                self.free.remove(expected)
            self.references[expected] = self.references.get(expected, 0) + 1

    @rule()
    def reset(self) -> None:
        assert self.pool.reset() == (not self.references)
        if not self.references:
            self.hash_of.clear()

    @invariant()
    def agrees(self) -> None:
        check_pool(self.pool)
        assert self.pool.num_free == len(self.free)
        assert sorted(cached_blocks(self.pool)) == sorted(self.hash_of)
        assert self.pool.usage == pytest.approx(len(self.references) / (NUM_BLOCKS - 1))


TestBlockPool = BlockPoolMachine.TestCase


def test_the_null_block_is_never_handed_out_and_never_taken_back() -> None:
    pool = BlockPool(4)
    assert NULL_BLOCK not in pool.allocate(3)
    with pytest.raises(ValueError, match="not in use"):
        pool.free([NULL_BLOCK])
