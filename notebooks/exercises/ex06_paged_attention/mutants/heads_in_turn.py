"""Misconception: query heads take the key/value heads in turn, 0 1 0 1, instead of 0 0 1 1 (repeat for repeat_interleave)."""

from __future__ import annotations

import torch
from torch import Tensor

from stage04_kernels.attention import AttentionMetadata
from stage04_kernels.paged_attention import paged_attention_torch as reference, torch_attention, write_kv

__all__ = ["paged_attention_torch", "torch_attention", "write_kv"]
REJECTED = "expected  key/value head [0]\n  got       key/value head [1]"


def paged_attention_torch(
    query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float, window: int | None = None
) -> Tensor:
    order = torch.tensor(sorted(range(query.shape[1]), key=lambda head: head % kv_cache.shape[3]))
    result = torch.empty_like(query)
    result[:, order] = reference(query[:, order], kv_cache, metadata, scale, window)
    return result
