"""Misconception: least recently used means: every freed block joins the end, whether or not anybody can find it."""

from __future__ import annotations

from stage03_engine.core.block_pool import BlockPool as Reference
from stage03_engine.core.kv_cache_manager import hash_block_tokens

REJECTED = "and the front if it has none"

__all__ = ["BlockPool", "hash_block_tokens"]


class BlockPool(Reference):
    def free(self, block_ids: list[int]) -> None:
        super().free(block_ids)
        for block in block_ids:
            if block in self._free:
                self._free.move_to_end(block)
