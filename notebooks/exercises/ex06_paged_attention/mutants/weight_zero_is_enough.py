"""Misconception: whole blocks may be gathered, since a masked key has the weight 0. But 0 times NaN is NaN."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from stage04_kernels.attention import AttentionMetadata
from stage04_kernels.paged_attention import paged_attention_torch as reference, torch_attention, write_kv

__all__ = ["paged_attention_torch", "torch_attention", "write_kv"]
REJECTED = "may hold anything, even NaN"


def paged_attention_torch(
    query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float, window: int | None = None
) -> Tensor:
    result = reference(query, kv_cache, metadata, scale, window)
    for r, (start, end) in enumerate(pairwise(metadata.query_start_loc_cpu)):
        if end - start == 1 and window is None:
            keys, values = (half[metadata.block_table[r]].flatten(0, 1) for half in kv_cache)
            keys, values = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (keys, values))
            scores = torch.einsum("hd,khd->hk", query[start], keys) * scale
            scores[:, metadata.seq_lens_cpu[r] :] = -torch.inf
            result[start] = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
    return result
