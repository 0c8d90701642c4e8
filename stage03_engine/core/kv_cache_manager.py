"""Which blocks hold the tokens of which request (vllm/v1/core/kv_cache_manager.py). Plain Python, no tensors."""

from __future__ import annotations

from stage03_engine.core.block_pool import BlockPool


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


class KVCacheManager:
    """The block table of every request that holds blocks.

    A block table only ever grows at its end while the request holds blocks: what was sent to the worker stays true. The one
    exception is `trim`, which the worker follows by itself.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.block_pool = BlockPool(num_blocks)
        self._tables: dict[str, list[int]] = {}

    def allocate_slots(self, request_id: str, num_tokens: int) -> list[int] | None:
        """Make room for the first `num_tokens` tokens of a request.

        Returns the blocks that are new (perhaps none), or None, and changes nothing, when too few are free.
        """
        table = self._tables.get(request_id, [])
        missing = cdiv(num_tokens, self.block_size) - len(table)
        if missing > self.block_pool.num_free:
            return None
        new_blocks = self.block_pool.allocate(max(0, missing))
        self._tables[request_id] = table + new_blocks
        return new_blocks

    def trim(self, request_id: str, num_tokens: int) -> None:
        """Give back the blocks behind the first `num_tokens` tokens: they held drafts that were rejected."""
        table = self._tables[request_id]
        needed = cdiv(num_tokens, self.block_size)
        self._tables[request_id] = table[:needed]
        self.block_pool.free(table[needed:])

    def free(self, request_id: str) -> int:
        """Give back all blocks of a request; returns how many. A request without blocks has none to give."""
        blocks = self._tables.pop(request_id, [])
        self.block_pool.free(blocks)
        return len(blocks)

    def block_table(self, request_id: str) -> list[int]:
        """The blocks of a request, in the order of its tokens."""
        return self._tables[request_id]

    def check_invariants(self) -> None:
        """Raises AssertionError when blocks are lost or shared, or the tables and the pool disagree."""
        self.block_pool.check_invariants()
        held = [block for table in self._tables.values() for block in table]
        assert len(held) == len(set(held)), "a block belongs to two requests"
        assert len(held) == self.block_pool.num_usable - self.block_pool.num_free, "tables and pool disagree"
