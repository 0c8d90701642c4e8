"""The blocks of the KV cache: which are in use, which are free, and what the free ones still hold.

Plain Python, no tensors. Source: vllm/v1/core/block_pool.py (BlockPool). vLLM implements the queue of free blocks as a linked
list of its own (kv_cache_utils.py, FreeKVCacheBlockQueue); an OrderedDict has one inside.
"""

from __future__ import annotations

from collections import OrderedDict

from stagetrace import trace

NULL_BLOCK = 0
"""Never given to a request: padding in a block table points here, so a stray read touches no request's tokens."""


class KVCacheBlock:
    """One block: how many requests use it, and the hash of its tokens once it is full and may be found again."""

    __slots__ = ("block_hash", "block_id", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None


class BlockPool:
    """Hands out block ids and takes them back; remembers full blocks by the hash of their tokens.

    A block in use has one reference per request. A freed block keeps its tokens and its hash until it is handed out
    again (then it is *evicted*), so a request with the same prefix can find it: a hit takes it back out of the free queue.
    Invariant: every block but the null block is either free or referenced, never both.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_usable = num_blocks - 1
        self._blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        # In the order of reuse. A prefix hit takes a block out of the middle, for which a list or a deque would need a search.
        self._free = OrderedDict((block.block_id, block) for block in self._blocks[1:])
        self._by_hash: dict[bytes, KVCacheBlock] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, those that still hold cached tokens included."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the usable blocks that requests hold, 0 to 1."""
        return 1.0 - len(self._free) / self.num_usable

    def num_free_among(self, block_ids: list[int]) -> int:
        """How many of these blocks are in the free queue (`touch` would take them out of it)."""
        return sum(self._blocks[i].ref_cnt == 0 for i in block_ids)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, the longest-free first, and evict what they held. Raises ValueError for too few."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} free")
        blocks = [self._free.popitem(last=False)[1] for _ in range(count)]
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
        """A prefix hit: add a reference to each block, and take it out of the free queue."""
        for block in (self._blocks[i] for i in block_ids):
            if block.ref_cnt == 0:
                del self._free[block.block_id]
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
                self._free[block.block_id] = block
                if block.block_hash is None:
                    self._free.move_to_end(block.block_id, last=False)

    def lookup(self, block_hash: bytes) -> int | None:
        """The block that holds these tokens, free or in use, or None."""
        block = self._by_hash.get(block_hash)
        return None if block is None else block.block_id

    def cache(self, block_id: int, block_hash: bytes) -> bool:
        """Make a full block findable; False if another block with the same tokens already is (two requests computed the
        same prefix side by side: block tables are append-only, so each keeps its own block)."""
        if block_hash in self._by_hash:
            return False
        self._blocks[block_id].block_hash = block_hash
        self._by_hash[block_hash] = self._blocks[block_id]
        return True

    def reset(self) -> bool:
        """Forget all cached tokens; does nothing and returns False while a block is in use."""
        if len(self._free) != self.num_usable:
            return False
        for block in self._by_hash.values():
            block.block_hash = None
        self._by_hash.clear()
        return True
