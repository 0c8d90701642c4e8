"""Misconception: a tensor's rows lie one behind the other. The query is a part of a wider one: its strides say where."""

from __future__ import annotations

import triton
import triton.language as tl

from stage04_kernels.triton_kernels.paged_attention import (
    _load_blocks,
    _load_keys_and_values,
    _paged_attention as _reference,
    _scores,
    _softmax_step,
)

__all__ = ["_load_blocks", "_load_keys_and_values", "_paged_attention", "_scores", "_softmax_step"]
REJECTED = "the query is read with its strides"


@triton.jit
def _paged_attention(
    out_ptr, lse_ptr, query_ptr, key_ptr, value_ptr, block_table_ptr, seq_lens_ptr, query_start_loc_ptr,
    tile_request_ptr, tile_first_ptr, scale, window,
    stride_query_token, stride_query_head, stride_table, num_kv_heads,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    _reference(
        out_ptr, lse_ptr, query_ptr, key_ptr, value_ptr, block_table_ptr, seq_lens_ptr, query_start_loc_ptr,
        tile_request_ptr, tile_first_ptr, scale, window,
        num_kv_heads * GROUP * HEAD_DIM, HEAD_DIM, stride_table, num_kv_heads,
        HEAD_DIM, PADDED_DIM, BLOCK_SIZE, GROUP, BLOCK_M, BLOCK_N, NUM_SPLITS, HAS_WINDOW, UPCAST,
    )  # fmt: skip
