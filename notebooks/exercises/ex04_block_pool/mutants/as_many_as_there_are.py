"""Misconception: if fewer blocks are free than wanted, the caller gets those, and may ask again."""

from __future__ import annotations

from stage03_engine.core.block_pool import BlockPool as Reference
from stage03_engine.core.kv_cache_manager import hash_block_tokens

REJECTED = "allocate raises ValueError and changes nothing"

__all__ = ["BlockPool", "hash_block_tokens"]


class BlockPool(Reference):
    def allocate(self, count: int) -> list[int]:
        return super().allocate(min(count, self.num_free))
