"""Misconception: a window of w is w positions before the token, and the token itself."""

from __future__ import annotations

from torch import Tensor

from stage04_kernels.attention import AttentionMetadata
from stage04_kernels.paged_attention import paged_attention_torch as reference, torch_attention, write_kv

__all__ = ["paged_attention_torch", "torch_attention", "write_kv"]
REJECTED = "With a window of w it sees only the last w of these."


def paged_attention_torch(
    query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float, window: int | None = None
) -> Tensor:
    return reference(query, kv_cache, metadata, scale, None if window is None else window + 1)
