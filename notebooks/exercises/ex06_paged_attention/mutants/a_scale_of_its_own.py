"""Misconception: scores are always divided by the square root of head_dim; the argument is a formality."""

from __future__ import annotations

from torch import Tensor

from stage04_kernels.attention import AttentionMetadata
from stage04_kernels.paged_attention import paged_attention_torch as reference, torch_attention, write_kv

__all__ = ["paged_attention_torch", "torch_attention", "write_kv"]
REJECTED = "The scores are multiplied by the argument scale."


def paged_attention_torch(
    query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float, window: int | None = None
) -> Tensor:
    return reference(query, kv_cache, metadata, query.shape[-1] ** -0.5, window)
