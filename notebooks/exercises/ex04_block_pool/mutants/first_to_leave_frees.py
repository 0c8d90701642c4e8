"""Misconception: whoever ends gives its blocks back, and a block that is given back is free."""

from __future__ import annotations

from stage03_engine.core.block_pool import BlockPool as Reference
from stage03_engine.core.kv_cache_manager import hash_block_tokens

REJECTED = "only when every request that uses it has given it back"

__all__ = ["BlockPool", "hash_block_tokens"]


class BlockPool(Reference):
    def free(self, block_ids: list[int]) -> None:
        for block in (self._blocks[each] for each in block_ids):
            block.ref_cnt = min(block.ref_cnt, 1)
        super().free(block_ids)
