"""The Triton kernels as a backend: attention in two or three launches, norms, activations and the sampler."""

from __future__ import annotations

from torch import Tensor

from stage04_kernels.attention import AttentionMetadata, Rotation
from stage04_kernels.triton_kernels.kv_write import rope_and_write_kv_triton, write_kv_triton
from stage04_kernels.triton_kernels.layers import LAYER_KERNELS
from stage04_kernels.triton_kernels.logprobs import SAMPLER_KERNELS
from stage04_kernels.triton_kernels.paged_attention import paged_attention_triton

__all__ = ["LAYER_KERNELS", "SAMPLER_KERNELS", "triton_attention"]


def triton_attention(
    query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float,
    window: int | None = None, rotation: Rotation | None = None, /,
) -> Tensor:  # fmt: skip
    """As `AttentionBackend`: one launch writes keys and values, and rotates them on the way; one or two attend."""
    query = rotate_and_write(query, key, value, kv_cache, metadata, rotation)
    return paged_attention_triton(query, kv_cache, metadata, scale, window)


def rotate_and_write(
    query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, rotation: Rotation | None
) -> Tensor:
    """Keys and values go into the cache, rotated if the model does that. Returns the queries, rotated too."""
    if rotation is None:
        write_kv_triton(key, value, kv_cache, metadata.slot_mapping)
        return query
    return rope_and_write_kv_triton(query, key, value, kv_cache, metadata.slot_mapping, *rotation)
