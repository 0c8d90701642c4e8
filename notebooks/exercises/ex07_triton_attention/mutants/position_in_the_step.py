"""Misconception: a token's position is its number in this step. But the cache may hold tokens that came before."""

from __future__ import annotations

import triton
import triton.language as tl

from stage04_kernels.triton_kernels.paged_attention import (
    LOG2E,
    _keys_of_program,
    _load_blocks,
    _load_keys_and_values,
    _scores,
    _softmax_step,
    _store_rows,
)

__all__ = ["_load_blocks", "_load_keys_and_values", "_paged_attention", "_scores", "_softmax_step"]
REJECTED = "expected  positions [0, 1] of a\n  got       positions [0]"


@triton.jit
def _paged_attention(
    out_ptr, lse_ptr, query_ptr, key_ptr, value_ptr, block_table_ptr, seq_lens_ptr, query_start_loc_ptr,
    tile_request_ptr, tile_first_ptr, scale, window,
    stride_query_token, stride_query_head, stride_table, num_kv_heads,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request, first_token = tl.load(tile_request_ptr + tile), tl.load(tile_first_ptr + tile)
    query_start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
    context = tl.load(seq_lens_ptr + request)
    row, dim = tl.arange(0, BLOCK_M), tl.arange(0, PADDED_DIM)
    token, head = first_token + row // GROUP, kv_head * GROUP + row % GROUP
    real_row, real_dim = (row // GROUP < BLOCK_M // GROUP) & (token < query_len), dim < HEAD_DIM
    position = token
    query_at = (query_start + token)[:, None] * stride_query_token + head[:, None] * stride_query_head + dim[None, :]
    query = tl.load(query_ptr + query_at, mask=real_row[:, None] & real_dim[None, :], other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
    begin, end = _keys_of_program(
        first_token, query_len, context, window, split, BLOCK_M // GROUP, BLOCK_N, NUM_SPLITS, HAS_WINDOW
    )
    last_seen = tl.where(real_row, tl.minimum(position, end - 1), -1)
    largest, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    for start in range(begin, end, BLOCK_N):
        key_position = start + tl.arange(0, BLOCK_N)
        block = _load_blocks(block_table_ptr + request * stride_table, key_position, end, BLOCK_SIZE)
        key, value = _load_keys_and_values(
            key_ptr, value_ptr, block, key_position, key_position < end, dim, real_dim, kv_head, num_kv_heads,
            HEAD_DIM, BLOCK_SIZE, query.dtype,
        )  # fmt: skip
        scores = _scores(query, key, key_position, position - window + 1, last_seen, scale * LOG2E, HAS_WINDOW)
        largest, total, mixed = _softmax_step(scores, value, largest, total, mixed)
    out_row = ((query_start + token) * (num_kv_heads * GROUP) + head) * NUM_SPLITS + split
    _store_rows(out_ptr, lse_ptr, out_row, real_row, dim, real_dim, largest, total, mixed, HEAD_DIM, NUM_SPLITS)
