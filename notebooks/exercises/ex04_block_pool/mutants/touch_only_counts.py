"""Misconception: a touched block has a reference, so allocate will pass it over; it may stay in the queue."""

from __future__ import annotations

from stage03_engine.core.block_pool import BlockPool as Reference
from stage03_engine.core.kv_cache_manager import hash_block_tokens

REJECTED = "A free block that is touched leaves the free queue."

__all__ = ["BlockPool", "hash_block_tokens"]


class BlockPool(Reference):
    def touch(self, block_ids: list[int]) -> None:
        for block in (self._blocks[each] for each in block_ids):
            block.ref_cnt += 1
