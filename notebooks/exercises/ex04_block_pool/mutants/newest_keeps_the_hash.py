"""Misconception: the newer of two blocks with the same tokens is the better one: it will be evicted later."""

from __future__ import annotations

from stage03_engine.core.block_pool import BlockPool as Reference
from stage03_engine.core.kv_cache_manager import hash_block_tokens

REJECTED = "the first keeps the hash"

__all__ = ["BlockPool", "hash_block_tokens"]


class BlockPool(Reference):
    def cache(self, block_id: int, block_hash: bytes) -> bool:
        if block_hash in self._by_hash:
            self._by_hash.pop(block_hash).block_hash = None
        return super().cache(block_id, block_hash)
