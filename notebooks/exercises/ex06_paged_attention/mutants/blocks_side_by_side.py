"""Misconception: the block table says where a request begins; its other blocks follow."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from stage04_kernels.attention import AttentionMetadata
from stage04_kernels.paged_attention import paged_attention_torch as reference, torch_attention, write_kv

__all__ = ["paged_attention_torch", "torch_attention", "write_kv"]
REJECTED = "expected  positions [0, 1, 2] of a\n  got       read: slot 6, which is nobody's"


def paged_attention_torch(
    query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float, window: int | None = None
) -> Tensor:
    following = metadata.block_table[:, :1] + torch.arange(metadata.block_table.shape[1])
    table = (following % kv_cache.shape[1]).int()
    return reference(query, kv_cache, replace(metadata, block_table=table), scale, window)
