"""Misconception: is_causal=True is the causal mask. It lets the first new token see one key, though the cache holds more."""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor

from stage04_kernels.attention import AttentionMetadata
from stage04_kernels.backends.reference import gather_context
from stage04_kernels.paged_attention import paged_attention_torch as reference, torch_attention, write_kv

__all__ = ["paged_attention_torch", "torch_attention", "write_kv"]
REJECTED = "expected  positions [0, 1] of a\n  got       positions [0]"


def paged_attention_torch(
    query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float, window: int | None = None
) -> Tensor:
    result = reference(query, kv_cache, metadata, scale, window)
    for r, (start, end) in enumerate(pairwise(metadata.query_start_loc_cpu)):
        if window is None:
            blocks, context = metadata.block_table[r].tolist(), metadata.seq_lens_cpu[r]
            group = query.shape[1] // kv_cache.shape[3]
            k, v = (
                gather_context(half, blocks, context).repeat_interleave(group, 1).transpose(0, 1) for half in kv_cache
            )
            q = query[start:end].transpose(0, 1)
            result[start:end] = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(0, 1)
    return result
