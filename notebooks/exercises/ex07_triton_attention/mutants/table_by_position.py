"""Misconception: the block table has an entry for each position. It has one for each block of positions."""

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
REJECTED = "expected  positions [0, 1] of a\n  got       read: slot 3, which is nobody's"


@triton.jit
def _load_blocks(table_ptr, key_position, end, BLOCK_SIZE: tl.constexpr):
    last = (end - 1) // BLOCK_SIZE
    return tl.load(table_ptr + tl.minimum(key_position, last), mask=key_position < end, other=0)
