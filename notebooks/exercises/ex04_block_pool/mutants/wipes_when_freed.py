"""Misconception: a free block is empty, so its hash goes when it is given back."""

from __future__ import annotations

from stage03_engine.core.block_pool import BlockPool as Reference
from stage03_engine.core.kv_cache_manager import hash_block_tokens

REJECTED = "and is found by it until it is handed out again"

__all__ = ["BlockPool", "hash_block_tokens"]


class BlockPool(Reference):
    def free(self, block_ids: list[int]) -> None:
        super().free(block_ids)
        for block in (self._blocks[each] for each in block_ids):
            if block.ref_cnt == 0 and block.block_hash is not None:
                self._evict(block)
