"""Misconception: a stack is as good as a queue: the block that was just given back is surely in a cache line."""

from __future__ import annotations

from stage03_engine.core.block_pool import BlockPool as Reference
from stage03_engine.core.kv_cache_manager import hash_block_tokens

REJECTED = "allocate takes from the front of the free queue"

__all__ = ["BlockPool", "hash_block_tokens"]


class BlockPool(Reference):
    def allocate(self, count: int) -> list[int]:
        for block in list(self._free)[: len(self._free) - count]:
            self._free.move_to_end(block)
        return super().allocate(count)[::-1]
