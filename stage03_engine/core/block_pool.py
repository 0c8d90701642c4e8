"""The blocks of the KV cache: who has which, which are free, and what the free ones still hold.

Plain Python, no tensors. Source: vllm/v1/core/block_pool.py (BlockPool), kv_cache_utils.py (FreeKVCacheBlockQueue).
"""

from __future__ import annotations

from collections.abc import Iterator

from stagetrace import trace

NULL_BLOCK = 0
"""Never given to a request: padding in a block table points here, so that a stray read hits nobody's tokens."""


class KVCacheBlock:
    """One block: how many requests use it, and the hash of its tokens once it is full and may be found again."""

    __slots__ = ("block_hash", "block_id", "next_free", "prev_free", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.prev_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None


class FreeKVCacheBlockQueue:
    """The free blocks in the order in which they will be reused, as a doubly linked list through the blocks themselves.

    A prefix hit takes a block out of the middle, which a list or a deque cannot do in constant time. The two sentinels
    spare every operation the question whether a neighbour exists.
    """

    def __init__(self, blocks: list[KVCacheBlock]) -> None:
        self._head, self._tail = KVCacheBlock(-1), KVCacheBlock(-1)
        self._head.next_free, self._tail.prev_free = self._tail, self._head
        self.num_free = 0
        for block in blocks:
            self.append(block)

    def append(self, block: KVCacheBlock) -> None:
        """To be reused last."""
        assert self._tail.prev_free is not None
        self._insert(self._tail.prev_free, block, self._tail)

    def prepend(self, block: KVCacheBlock) -> None:
        """To be reused next."""
        assert self._head.next_free is not None
        self._insert(self._head, block, self._head.next_free)

    def _insert(self, before: KVCacheBlock, block: KVCacheBlock, after: KVCacheBlock) -> None:
        block.prev_free, block.next_free = before, after
        before.next_free = after.prev_free = block
        self.num_free += 1

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out, wherever it stands."""
        assert block.prev_free is not None and block.next_free is not None, "the block is not free"
        block.prev_free.next_free, block.next_free.prev_free = block.next_free, block.prev_free
        block.prev_free = block.next_free = None
        self.num_free -= 1

    def popleft(self) -> KVCacheBlock:
        """The block that was free for the longest time. The caller has checked that there is one."""
        block = self._head.next_free
        assert block is not None and block is not self._tail, "no free block"
        self.remove(block)
        return block

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free


class BlockPool:
    """Hands out block ids and takes them back; remembers full blocks by the hash of their tokens.

    A block in use has one reference per request. A freed block keeps its tokens and its hash until it is handed out
    again (then it is *evicted*), so a request with the same prefix can find it: a hit takes it back out of the free queue.
    Invariant: every block but the null block is either free or referenced, never both (`check_invariants`).
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_usable = num_blocks - 1
        self._blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self._free = FreeKVCacheBlockQueue(self._blocks[1:])
        self._by_hash: dict[bytes, KVCacheBlock] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, those that still hold cached tokens included."""
        return self._free.num_free

    @property
    def num_cached(self) -> int:
        """Free blocks whose tokens can still be found."""
        return sum(block.block_hash is not None for block in self._free)

    @property
    def cached_blocks(self) -> list[int]:
        """The blocks, free or in use, whose tokens can be found by their hash."""
        return [block.block_id for block in self._by_hash.values()]

    @property
    def usage(self) -> float:
        """Share of the usable blocks that requests hold, 0 to 1."""
        return 1.0 - self._free.num_free / self.num_usable

    def num_free_among(self, block_ids: list[int]) -> int:
        """How many of these blocks stand in the free queue (and would leave it if they were touched)."""
        return sum(self._blocks[i].ref_cnt == 0 for i in block_ids)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, the longest-free first; what they held is forgotten. Raises ValueError for too few."""
        if count > self._free.num_free:
            raise ValueError(f"{count} blocks wanted, {self._free.num_free} free")
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            block.ref_cnt = 1
            if block.block_hash is not None:
                self._evict(block)
        return [block.block_id for block in blocks]

    def _evict(self, block: KVCacheBlock) -> None:
        assert block.block_hash is not None
        del self._by_hash[block.block_hash]
        block.block_hash = None
        if trace.on:
            trace.emit("kv.evicted", block=block.block_id)

    def touch(self, block_ids: list[int]) -> None:
        """A prefix hit: one more reference each, and out of the free queue."""
        for block in (self._blocks[i] for i in block_ids):
            if block.ref_cnt == 0:
                self._free.remove(block)
            block.ref_cnt += 1

    def free(self, block_ids: list[int]) -> None:
        """Give references back, the block to be reused first at the front. Raises ValueError for one that is not in use.

        A block without a hash holds nothing that could be found again: it is reused before all others.
        """
        for block in (self._blocks[i] for i in block_ids):
            if block.ref_cnt == 0:
                raise ValueError(f"block {block.block_id} is not in use")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                if block.block_hash is None:
                    self._free.prepend(block)
                else:
                    self._free.append(block)

    def lookup(self, block_hash: bytes) -> int | None:
        """The block that holds these tokens, free or in use, or None."""
        block = self._by_hash.get(block_hash)
        return None if block is None else block.block_id

    def cache(self, block_id: int, block_hash: bytes) -> bool:
        """Make a full block findable; False when another block with the same tokens is already (two requests computed
        the same prefix side by side: block tables are append-only, so neither gives its block up)."""
        if block_hash in self._by_hash:
            return False
        self._blocks[block_id].block_hash = block_hash
        self._by_hash[block_hash] = self._blocks[block_id]
        return True

    def reset(self) -> bool:
        """Forget all cached tokens; False, and nothing is done, while a block is in use."""
        if self._free.num_free != self.num_usable:
            return False
        for block in self._by_hash.values():
            block.block_hash = None
        self._by_hash.clear()
        return True

    def check_invariants(self) -> None:
        """Raises AssertionError when free + cached + used is not all, or the hashes contradict themselves."""
        free = [block.block_id for block in self._free]
        used = [block.block_id for block in self._blocks[1:] if block.ref_cnt > 0]
        assert len(free) == len(set(free)) == self._free.num_free, "a block is free twice"
        assert sorted(free + used) == list(range(1, self.num_usable + 1)), "a block is lost, or free and used"
        assert self._blocks[NULL_BLOCK].ref_cnt == 0 and self._blocks[NULL_BLOCK].block_hash is None
        hashed = {block.block_hash: block for block in self._blocks if block.block_hash is not None}
        assert hashed == self._by_hash, "the hash table and the blocks disagree"
