"""Attention over 8-bit codes, compiled for the CPU: each is widened to float32 in the span of positions that is being read, and nothing else is copied.

The arithmetic is that of the native backend in float32, over the same numbers as the slow twin has: so the result is that backend's over the twin's copy,
bit for bit. A model in bfloat16 has its queries, keys and values widened here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stage04_kernels.attention import AttentionBackend, AttentionMetadata, Rotation
from stage04_kernels.backends.native.library import function
from stage04_kernels.features.kv_cache_8bit.formats import SCALE_BYTES, KVFormat
from stage04_kernels.paged_attention import rotated

CODINGS = ("int8", "float8_e4m3fn", "float8_e5m2")
"""As in native.cpp, in this order."""
DTYPES = (torch.float32, torch.bfloat16)
ATTENTION = function("attention_codes", "pppppppppplllllllllllfili")


def native_attention_8bit(other: AttentionBackend, kv_format: KVFormat) -> AttentionBackend:
    """The attention over a cache of codes. Number formats of the model that native.cpp does not know take the way of `other`."""
    coding, scale_bytes = CODINGS.index(kv_format.dtype), SCALE_BYTES * kv_format.has_scales

    def attention(
        query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float,
        window: int | None = None, rotation: Rotation | None = None, /,
    ) -> Tensor:  # fmt: skip
        if query.dtype not in DTYPES or not query.is_cpu:
            return other(query, key, value, kv_cache, metadata, scale, window, rotation)
        query, key = rotated(query, key, rotation)
        rows, keys, values = _rows(query), _rows(key), _rows(value)
        num_tokens, num_heads, head_dim = query.shape
        out = rows.new_empty(query.shape)
        out[metadata.query_start_loc_cpu[-1] :] = 0  # padding rows
        key_cache, value_cache = kv_cache.unbind()
        ATTENTION(
            rows.data_ptr(), keys.data_ptr(), values.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), out.data_ptr(),
            metadata.query_start_loc.data_ptr(), metadata.seq_lens.data_ptr(), metadata.block_table.data_ptr(),
            metadata.slot_mapping.data_ptr(), num_tokens, len(metadata.seq_lens_cpu), rows.stride(0), keys.stride(0),
            values.stride(0), metadata.block_table.stride(0), kv_cache.shape[2], num_heads, kv_cache.shape[3], head_dim,
            window or 0, scale, torch.get_num_threads(), scale_bytes, coding,
        )  # fmt: skip
        return out.to(query.dtype)

    return attention


def _rows(x: Tensor) -> Tensor:
    """float32 [num_tokens, heads, head_dim] in which a token's heads lie side by side; tokens may lie apart."""
    x = x.float()
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
