"""Misconception: nobody reads the rows of padding, so whatever stands there may stay."""

from __future__ import annotations

from torch import Tensor

from stage04_kernels.attention import AttentionMetadata
from stage04_kernels.paged_attention import paged_attention_torch as reference, torch_attention, write_kv

__all__ = ["paged_attention_torch", "torch_attention", "write_kv"]
REJECTED = "Rows behind the last request are zeros."


def paged_attention_torch(
    query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float, window: int | None = None
) -> Tensor:
    result = reference(query, kv_cache, metadata, scale, window)
    result[metadata.query_start_loc_cpu[-1] :] = query[metadata.query_start_loc_cpu[-1] :]
    return result
