"""Keys and values into the paged cache, and the same fused with the rotary embedding (vLLM: reshape_and_cache_flash in
csrc/cache_kernels.cu; rotary_embedding in csrc/pos_encoding_kernels.cu, which vLLM fuses in its compiled graph).

One program per token. Each decides for itself, so the host waits for no answer: a padding row's program writes nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stage04_kernels.triton_kernels.tiles import next_power_of_2


@triton.jit
def _write_kv(
    key_ptr,  # [num_tokens, num_kv_heads, HEAD_DIM]
    value_ptr,
    key_cache_ptr,  # [num_slots, num_kv_heads, HEAD_DIM]
    value_cache_ptr,
    slot_mapping_ptr,  # [num_tokens] int64; -1 = padding
    stride_key,
    stride_value,
    ROW: tl.constexpr,  # numbers per token: num_kv_heads * HEAD_DIM
    PADDED_ROW: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    at = tl.arange(0, PADDED_ROW)
    real = at < ROW
    key = tl.load(key_ptr + token * stride_key + at, mask=real)
    value = tl.load(value_ptr + token * stride_value + at, mask=real)
    tl.store(key_cache_ptr + slot * ROW + at, key, mask=real)
    tl.store(value_cache_ptr + slot * ROW + at, value, mask=real)


@triton.jit
def _turn(x_ptr, out_ptr, stride_in, stride_out, cos, sin, head, pair, real, HALF: tl.constexpr):
    """Rotate one head's pairs, number i with number i + HALF."""
    first = tl.load(x_ptr + head * stride_in + pair, mask=real, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + head * stride_in + HALF + pair, mask=real, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + head * stride_out + pair, (first * cos - second * sin).to(dtype), mask=real)
    tl.store(out_ptr + head * stride_out + HALF + pair, (second * cos + first * sin).to(dtype), mask=real)


@triton.jit
def _rope_and_write_kv(
    query_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    key_ptr,  # [num_tokens, num_kv_heads, HEAD_DIM]
    value_ptr,
    turned_query_ptr,  # [num_tokens, num_heads, HEAD_DIM], contiguous
    key_cache_ptr,  # [num_slots, num_kv_heads, HEAD_DIM]
    value_cache_ptr,
    slot_mapping_ptr,  # [num_tokens] int64; -1 = padding
    cos_ptr,  # [num_tokens, HEAD_DIM / 2] float32
    sin_ptr,
    stride_query_token,
    stride_query_head,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEADS: tl.constexpr,  # both head counts and HEAD_DIM, rounded up to powers of two
    PADDED_KV_HEADS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    HALF: tl.constexpr = HEAD_DIM // 2
    pair = tl.arange(0, PADDED_DIM // 2)[None, :]
    real_pair = pair < HALF
    cos = tl.load(cos_ptr + token * HALF + pair, mask=real_pair, other=0.0)
    sin = tl.load(sin_ptr + token * HALF + pair, mask=real_pair, other=0.0)

    head = tl.arange(0, PADDED_HEADS)[:, None]
    real = (head < NUM_HEADS) & real_pair
    out = turned_query_ptr + token * (NUM_HEADS * HEAD_DIM)
    source = query_ptr + token * stride_query_token
    _turn(source, out, stride_query_head, HEAD_DIM, cos, sin, head, pair, real, HALF)

    kv_head = tl.arange(0, PADDED_KV_HEADS)[:, None]
    row = slot * (NUM_KV_HEADS * HEAD_DIM)
    real = (kv_head < NUM_KV_HEADS) & real_pair
    source = key_ptr + token * stride_key_token
    _turn(source, key_cache_ptr + row, stride_key_head, HEAD_DIM, cos, sin, kv_head, pair, real, HALF)

    dim = tl.arange(0, PADDED_DIM)[None, :]
    real = (kv_head < NUM_KV_HEADS) & (dim < HEAD_DIM)
    value = tl.load(value_ptr + token * stride_value_token + kv_head * stride_value_head + dim, mask=real, other=0.0)
    tl.store(value_cache_ptr + row + kv_head * HEAD_DIM + dim, value, mask=real)


def write_kv_triton(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """As `write_kv`."""
    if len(key) == 0:
        return
    row = key.shape[1] * key.shape[2]
    key, value = (x if x[0].is_contiguous() else x.contiguous() for x in (key, value))
    _write_kv[(len(key),)](
        key, value, kv_cache[0], kv_cache[1], slot_mapping, key.stride(0), value.stride(0),
        ROW=row, PADDED_ROW=next_power_of_2(row), num_warps=4,
    )  # fmt: skip


def rope_and_write_kv_triton(
    query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """`apply_rope` to queries and keys, and `write_kv`, in one pass over the tokens: returns the rotated queries.

    query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads, head_dim]; cos, sin as `rope_cos_sin` gives
    them. Keys go only into the cache. The queries of padding rows are zeros.
    """
    num_tokens, num_heads, head_dim = query.shape
    turned = query.new_zeros(num_tokens, num_heads, head_dim)
    if num_tokens == 0:
        return turned
    query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
    num_kv_heads = key.shape[1]
    _rope_and_write_kv[(num_tokens,)](
        query, key, value, turned, kv_cache[0], kv_cache[1], slot_mapping, cos, sin,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, PADDED_HEADS=next_power_of_2(num_heads),
        PADDED_KV_HEADS=next_power_of_2(num_kv_heads), PADDED_DIM=next_power_of_2(head_dim),
        num_warps=8 if num_heads * head_dim >= 4096 else 4,
    )  # fmt: skip
    return turned
