"""Misconception: the hash of a block is overwritten when the block is cached again, so nobody need delete it."""

from __future__ import annotations

from stage03_engine.core.block_pool import BlockPool as Reference
from stage03_engine.core.kv_cache_manager import hash_block_tokens

REJECTED = "nobody finds its old tokens any more"

__all__ = ["BlockPool", "hash_block_tokens"]


class BlockPool(Reference):
    def allocate(self, count: int) -> list[int]:
        if count > self.num_free:
            return super().allocate(count)
        hashes = dict(self._by_hash)
        for block in self._by_hash.values():
            block.block_hash = None
        self._by_hash.clear()
        blocks = super().allocate(count)
        self._by_hash.update(hashes)
        for block_hash, block in hashes.items():
            block.block_hash = block_hash
        return blocks
