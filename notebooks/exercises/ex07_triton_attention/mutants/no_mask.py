"""Misconception: what is loaded beyond the end is thrown away later, so it needs no mask. It may be nobody's memory."""

from __future__ import annotations

import triton
import triton.language as tl

from stage04_kernels.triton_kernels.paged_attention import (
    _load_keys_and_values,
    _paged_attention,
    _scores,
    _softmax_step,
)

__all__ = ["_load_blocks", "_load_keys_and_values", "_paged_attention", "_scores", "_softmax_step"]
REJECTED = "out of bounds: _paged_attention, argument block_table_ptr"


@triton.jit
def _load_blocks(table_ptr, key_position, end, BLOCK_SIZE: tl.constexpr):
    return tl.load(table_ptr + key_position // BLOCK_SIZE)
