"""Paged attention for CPUs, compiled (vLLM: csrc/cpu/cpu_attn.cpp and its paged attention for CPUs).

Each block of keys and values is read where it lies; nothing is gathered or padded, and no matrix of scores is made. A row's
result does not depend, in any bit, on the batch or on how its prompt was cut into chunks. native.cpp says how.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stage04_kernels.attention import AttentionMetadata, Rotation
from stage04_kernels.backends.native.layers import functions_of
from stage04_kernels.paged_attention import paged_attention_torch, rotated, torch_attention, write_kv

FUNCTIONS = functions_of("attention", "pppppppppplllllllllllfi")


def is_supported(query: Tensor, kv_cache: Tensor) -> bool:
    """Float32 or bfloat16 on a CPU, the cache in the format of the queries."""
    return query.dtype in FUNCTIONS and kv_cache.dtype == query.dtype and query.is_cpu


def native_attention(
    query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float,
    window: int | None = None, rotation: Rotation | None = None, /,
) -> Tensor:  # fmt: skip
    """As `AttentionBackend`. Number formats that it does not know take the torch path."""
    if not is_supported(query, kv_cache):
        return torch_attention(query, key, value, kv_cache, metadata, scale, window, rotation)
    query, key = rotated(query, key, rotation)
    return _call(query, _rows(key), _rows(value), kv_cache, metadata, scale, window)


def paged_attention_native(
    query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float, window: int | None = None
) -> Tensor:
    """Attention alone, over what the cache holds already. Arguments as in `AttentionBackend`."""
    if not is_supported(query, kv_cache):
        return paged_attention_torch(query, kv_cache, metadata, scale, window)
    return _call(query, None, None, kv_cache, metadata, scale, window)


def _rows(x: Tensor) -> Tensor:
    """[num_tokens, heads, head_dim] in which a token's heads lie side by side; tokens may lie apart."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _call(
    query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor, metadata: AttentionMetadata,
    scale: float, window: int | None,
) -> Tensor:  # fmt: skip
    query = _rows(query)
    num_tokens, num_heads, head_dim = query.shape
    out = query.new_empty(query.shape)
    out[metadata.query_start_loc_cpu[-1] :] = 0  # padding rows
    keys, values = kv_cache.unbind()
    FUNCTIONS[query.dtype](
        query.data_ptr(), None if key is None else key.data_ptr(), None if value is None else value.data_ptr(),
        keys.data_ptr(), values.data_ptr(), out.data_ptr(), metadata.query_start_loc.data_ptr(),
        metadata.seq_lens.data_ptr(), metadata.block_table.data_ptr(), metadata.slot_mapping.data_ptr(),
        num_tokens, len(metadata.seq_lens_cpu), query.stride(0), 0 if key is None else key.stride(0),
        0 if value is None else value.stride(0), metadata.block_table.stride(0), kv_cache.shape[2], num_heads,
        kv_cache.shape[3], head_dim, window or 0, scale, torch.get_num_threads(),
    )  # fmt: skip
    return out


native_attention.parts = write_kv, paged_attention_native  # type: ignore[attr-defined]  # for those who want to call them one by one
