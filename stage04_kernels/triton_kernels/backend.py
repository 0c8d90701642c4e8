"""The Triton kernels as an attention backend: one launch writes keys and values (turned on the way), one or two attend."""

from __future__ import annotations

from torch import Tensor

from stage04_kernels.attention_metadata import AttentionMetadata
from stage04_kernels.triton_kernels.kv_write import rope_and_write_kv_triton, write_kv_triton
from stage04_kernels.triton_kernels.paged_attention import paged_attention_triton


def triton_attention(
    query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float,
    window: int | None, rotation: tuple[Tensor, Tensor] | None,
) -> Tensor:  # fmt: skip
    """As `attention`."""
    if rotation is None:
        write_kv_triton(key, value, kv_cache, metadata.slot_mapping)
    else:
        query = rope_and_write_kv_triton(query, key, value, kv_cache, metadata.slot_mapping, *rotation)
    out = paged_attention_triton(query, kv_cache, metadata, scale, window)
    assert isinstance(out, Tensor)
    return out
