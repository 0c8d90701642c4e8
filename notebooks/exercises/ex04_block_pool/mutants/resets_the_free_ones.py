"""Misconception: reset can always forget the free blocks, whatever the others do."""

from __future__ import annotations

from stage03_engine.core.block_pool import BlockPool as Reference
from stage03_engine.core.kv_cache_manager import hash_block_tokens

REJECTED = "does nothing and returns False while a block is in use"

__all__ = ["BlockPool", "hash_block_tokens"]


class BlockPool(Reference):
    def reset(self) -> bool:
        for block in self._free.values():
            if block.block_hash is not None:
                self._evict(block)
        return super().reset()
