"""Misconception: the same 16 tokens have the same keys and values wherever they stand, so the parent does not matter."""

from __future__ import annotations

from collections.abc import Sequence

from stage03_engine.core.block_pool import BlockPool
from stage03_engine.core.kv_cache_manager import hash_block_tokens as reference

REJECTED = "is the sha256 of its parent's hash"

__all__ = ["BlockPool", "hash_block_tokens"]


def hash_block_tokens(parent: bytes, token_ids: Sequence[int], salt: str | None) -> bytes:
    return reference(b"", token_ids, salt)
